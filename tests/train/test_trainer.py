"""Runs on a tiny target: resume, overfitting, export, and the errors that stop a run before it starts."""

import json

import pytest
import torch
from safetensors.torch import load_file

from speccompile.checkpoint.heads import open_head
from speccompile.errors import ConfigError
from speccompile.model.load import draft_token_ids, load_head
from speccompile.train.cache import CacheError, Rollout, RolloutCache, write_shard
from speccompile.train.evaluate import measure_acceptance
from speccompile.train.initial import WarmStart
from speccompile.train.schedule import epoch_steps
from speccompile.train.trainer import Trainer
from speccompile.train.vocabulary import choose_draft_vocabulary
from tests.train.tiny import EOS, VOCAB, fill_cache, tiny_cache, tiny_config, tiny_target


def make(tmp_path, *, records=None, target=None, output="head", **changes):
    target = target or tiny_target()
    if not (tmp_path / "cache").exists():
        tiny_cache(tmp_path / "cache", target)
    config = tiny_config(**changes)
    cache = RolloutCache(tmp_path / "cache", config.held_out_percent)
    log = (records if records is not None else []).append
    return Trainer(target, cache, config, tmp_path / output, log)


def losses(records):
    return [r["loss"] for r in records if r["kind"] == "step"]


@pytest.mark.parametrize(
    "kind",
    [{"layers": 2, "accumulate": 2}, {"kind": "eagle3", "aux_layers": "0,1,2", "loss": "kl:0.5,coupling"}],
)
def test_a_resumed_run_equals_an_unbroken_one(kind, tmp_path):
    whole, first, second = [], [], []
    make(tmp_path, records=whole, steps=7, **kind, output="whole").train()
    broken = make(tmp_path, records=first, steps=7, **kind, output="broken")
    for _ in range(2):  # stops inside the first epoch
        for micro_batches in epoch_steps(broken.cache, broken.config, broken.progress, list):
            broken.step(micro_batches)
            if broken.progress.step in (2, 3):
                break
    broken.save_state()
    fill_cache(tmp_path / "cache", tiny_target(), seed=9)  # a shard that appears while the run is down
    for shard in (tmp_path / "cache").glob("s9-*"):
        shard.rename(tmp_path / shard.name)
    again = make(tmp_path, records=second, steps=7, **kind, output="broken")
    assert again.resume()
    again.train()
    assert losses(first) + losses(second) == losses(whole)
    a, b = (load_file(tmp_path / n / "model.safetensors") for n in ("whole", "broken"))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_new_shards_join_at_the_next_epoch_and_not_before(tmp_path):
    trainer = make(tmp_path)
    plan = epoch_steps(trainer.cache, trainer.config, trainer.progress, list)
    next(plan)
    before = list(trainer.progress.shards)
    fill_cache(tmp_path / "cache", tiny_target(), seed=9)
    for _ in plan:
        pass
    assert trainer.progress.shards == before
    next(epoch_steps(trainer.cache, trainer.config, trainer.progress, list))
    assert len(trainer.progress.shards) == len(before) + 2


def test_it_overfits_ten_sequences(tmp_path):
    target = tiny_target()
    fill_cache(tmp_path / "all", target, batches=2)
    source = RolloutCache(tmp_path / "all", 0)
    ten = [Rollout(*source.tokens(r), source.feature(r, "hidden")) for r in source.refs[:10]]
    write_shard(tmp_path / "cache", "ten", ten, {})
    records: list = []
    make(tmp_path, records=records, steps=150, lr=5e-3, feature_weight=0.0).train()
    steps = [r for r in records if r["kind"] == "step"]
    assert steps[0]["accuracy"][0] < 0.6
    assert min(sum(r["accuracy"]) / 2 for r in steps[-5:]) > 0.9


@pytest.mark.parametrize("tied", [True, False])
def test_an_exported_head_loads_and_drafts_the_same(tmp_path, tied):
    target = tiny_target(tied=tied)
    trainer = make(tmp_path, target=target)
    trainer.train()
    raw = json.loads((tmp_path / "head" / "config.json").read_text())
    assert raw["bias"] is False, "probe R07: the config says what the file holds"
    assert "fc.bias" not in load_file(tmp_path / "head" / "model.safetensors")
    head = open_head(tmp_path / "head", target.config)
    assert head.config.kind == "eagle1"
    assert head.config.rope.theta == target.config.rope.theta
    assert draft_token_ids(head.config, head.tensor).tolist() == trainer.token_ids.tolist()
    loaded = load_head(head.config, head.tensor, target, torch.float32)
    for name, value in trainer.head.named_parameters():
        other = dict(loaded.named_parameters())[name]
        torch.testing.assert_close(other, value.detach().bfloat16().float() if value.requires_grad else value)
    batches = [trainer.load(trainer.cache.refs)]
    ours = measure_acceptance(trainer.head, trainer.token_ids, batches, depth=2)
    theirs = measure_acceptance(loaded, trainer.token_ids, batches, depth=2)
    assert ours.rounds == theirs.rounds > 0
    assert ours.chain == pytest.approx(theirs.chain, abs=0.03)


def test_a_run_can_start_from_another_head(tmp_path):
    first = make(tmp_path, output="first")
    first.train()
    target = tiny_target()
    head = open_head(tmp_path / "first", target.config)
    start = load_head(head.config, head.tensor, target, torch.float32)
    cache = RolloutCache(tmp_path / "cache", 0)
    config = tiny_config(draft_vocab_size=64)
    warm = WarmStart(start, draft_token_ids(head.config, head.tensor))
    second = Trainer(target, cache, config, tmp_path / "second", lambda _r: None, init=warm)
    weight = second.head.layers[0].mlp.down_proj.weight
    torch.testing.assert_close(weight.detach(), start.layers[0].mlp.down_proj.weight.detach())
    assert weight.requires_grad
    assert len(second.token_ids) == 64


def test_an_empty_mask_stops_before_the_first_step(tmp_path):
    """Probe R01."""
    target = tiny_target()
    source = tiny_cache(tmp_path / "all", target)
    rows = []
    for r in source.refs:
        ids, features = source.tokens(r)[0], source.feature(r, "hidden")
        rows.append(Rollout(ids, torch.zeros(len(ids)).bool(), features))
    write_shard(tmp_path / "cache", "none", rows, {})
    with pytest.raises(CacheError, match="0 supervised tokens in 100%"):
        make(tmp_path)


def test_a_cache_that_is_all_held_out_is_refused(tmp_path):
    with pytest.raises(CacheError, match="all sequences are held out"):
        make(tmp_path, held_out_percent=99)


def test_features_of_another_target_are_refused(tmp_path):
    tiny_cache(tmp_path / "cache", tiny_target())
    with pytest.raises(CacheError, match="wrong target: its lm_head predicts"):
        make(tmp_path, target=tiny_target(seed=8))
    with pytest.raises(CacheError, match="wrong target: features are 32 wide, its are 40"):
        make(tmp_path, target=tiny_target(hidden=40))


@pytest.mark.parametrize("size", [1, 97])
def test_an_absurd_draft_vocabulary_is_refused(tmp_path, size):
    with pytest.raises(ConfigError, match="draft_vocab_size"):
        make(tmp_path, draft_vocab_size=size)


def test_other_settings_cannot_resume(tmp_path):
    make(tmp_path).train()
    with pytest.raises(ConfigError, match=r"that run had lr 0\.001"):
        make(tmp_path, lr=2e-3).resume()


def test_draft_vocabulary_is_filled_deterministically():
    """Probe R05: 4 distinct tokens, 10 wanted; the end token is always in."""
    counts = torch.zeros(VOCAB, dtype=torch.int64)
    counts[[50, 60, 70, 80]] = torch.tensor([3, 9, 1, 1])
    ids = choose_draft_vocabulary(counts, 10, (EOS, 90)).tolist()
    assert ids == sorted(ids)
    assert {EOS, 90, 50, 60, 70, 80} < set(ids)
    assert set(ids) - {EOS, 90, 50, 60, 70, 80} == {0, 1, 3, 4}
    assert ids == choose_draft_vocabulary(counts, 10, (90, EOS)).tolist()


def test_a_damaged_shard_is_named(tmp_path):
    target = tiny_target()
    tiny_cache(tmp_path / "cache", target)
    shard = next((tmp_path / "cache").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CacheError, match=shard.name):
        RolloutCache(tmp_path / "cache")
    with pytest.raises(CacheError, match="no rollout shards"):
        RolloutCache(tmp_path)
