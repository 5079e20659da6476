"""Two gloo processes train the head that one process trains."""

import json

import pytest
import torch

from speccompile.errors import ConfigError
from speccompile.train.cache import RolloutCache
from speccompile.train.distributed import Ranks
from speccompile.train.trainer import Trainer
from tests.train.tiny import tiny_cache, tiny_config, tiny_target
from tests.train.train_cli import call, losses, make_pair, start, train_line

TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node 2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.mark.parametrize("kind", ["eagle1", "eagle3 --aux-layers 0,1"])
def test_two_processes_train_what_one_trains(folder, kind):
    extra = f"--kind {kind} --steps 4 --accumulate 4"
    call(train_line(folder, f"one-{kind[:6]}", extra))
    two = start(train_line(folder, f"two-{kind[:6]}", extra), TORCHRUN)
    shown, errors = two.communicate(timeout=240)
    assert two.returncode == 0, errors
    assert [r["step"] for r in map(json.loads, shown.splitlines()) if r["kind"] == "step"] == [1, 2, 3, 4]
    whole, parts = (losses(folder, f"{n}-{kind[:6]}") for n in ("one", "two"))
    assert len(whole) == 4
    assert parts == pytest.approx(whole, rel=1e-5)
    states = [torch.load(folder / f"{n}-{kind[:6]}" / "train_state.pt") for n in ("one", "two")]
    for name, value in states[0]["head"].items():
        torch.testing.assert_close(value, states[1]["head"][name], rtol=1e-3, atol=2e-5)


def test_uneven_micro_batches_are_refused(tmp_path):
    target = tiny_target()
    tiny_cache(tmp_path / "cache", target)
    config, cache = tiny_config(accumulate=3), RolloutCache(tmp_path / "cache", 0)
    with pytest.raises(ConfigError, match="must be a multiple of the 2 processes; give --accumulate 4"):
        Trainer(target, cache, config, tmp_path / "head", lambda _r: None, ranks=Ranks(0, 2))


def test_shares_cover_every_micro_batch_once():
    shares = [Ranks(rank, 3).share(list(range(6))) for rank in range(3)]
    assert shares == [[0, 3], [1, 4], [2, 5]]
    with pytest.raises(ConfigError, match="give --accumulate 6"):
        Ranks(0, 3).check_accumulate(4)
    Ranks().check_accumulate(5)
