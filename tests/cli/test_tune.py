"""``tune`` on the tiny engine: measured, stored, shown by ``inspect``, used by ``run``, replaced, refused."""

from __future__ import annotations

import json
import shutil

import pytest

from speccompile.build.table_file import TABLE_PATH
from speccompile.cli.tune import default_batches, default_contexts
from speccompile.errors import ConfigError, EngineError
from speccompile.runtime.engine import Engine
from speccompile.tree.named import OFF, chain
from speccompile.tree.table import table_from_json
from speccompile.tune.search import Choice
from speccompile.tune.tuner import Trial, TuneConfig, _without_losers
from tests.runtime.fakes import limits


@pytest.fixture(scope="module")
def engine(tiny_engine, tmp_path_factory):
    return shutil.copytree(tiny_engine.path, tmp_path_factory.mktemp("tuned") / "engine")


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("hello", "the fox", "x y")))
    return file


@pytest.fixture(scope="module")
def size():
    return ["--limit", 2, "--max-tokens", 8, "--batch-sizes", "1,2", "--contexts", "20,40"]


def test_tune_stores_a_table_that_is_shown_and_used(engine, invoke, prompts, size, tmp_path):
    plot = tmp_path / "plot.png"
    report = json.loads(invoke("tune", engine, "--prompts", prompts, *size, "--json", "--plot", plot).stdout)
    table = table_from_json(report["table"])
    assert (table.batch, table.context) == ((1, 2), (20, 40))
    assert [(c["batch"], c["context"]) for c in report["choices"]] == [(1, 20), (1, 40), (2, 20), (2, 40)]
    assert [trial["batch"] for trial in report["trials"]] == [1, 2]
    sizes = Engine.load(engine, tuned=False).programs.limits
    for tree in table.trees:
        assert tree.rows <= sizes.rows_per_request and tree.depth <= sizes.max_tree_depth
        assert tree.max_rank < sizes.draft_topk
    for load in report["costs"]:
        assert min(load["target_step"]["seconds"]) > 0
    assert plot.read_bytes()[:4] == b"\x89PNG"

    shown = invoke("inspect", engine, "--verify").stdout
    assert "Predicted" in shown and "Measured" in shown and "verified" in shown
    data = json.loads(invoke("inspect", engine, "--json").stdout)
    assert data["tuned"]["table"] == report["table"] and data["tuned"]["report"]["trials"] == report["trials"]

    base = ["run", engine, "-p", "hello", "--max-tokens", 12, "--temperature", 1, "--seed", 2, "--json"]
    answers = [
        json.loads(invoke(*base, *tree).stdout)["token_ids"]
        for tree in ([], ["--no-spec"], ["--tree", "chain-2"])
    ]
    assert answers[0] == answers[1] == answers[2]


def test_tuning_again_replaces_a_damaged_table_and_takes_statistics(engine, invoke, prompts, size, tmp_path):
    (engine / TABLE_PATH).write_text("{")
    with pytest.raises(EngineError, match=r"table\.json: cannot be read"):
        invoke("inspect", engine)
    with pytest.raises(EngineError, match=r"table\.json: cannot be read"):
        Engine.load.__wrapped__(engine)
    statistics = tmp_path / "s.json"
    marginal = [[0.9, 0.05], [0.8, 0.05], [0.7, 0.05]]
    statistics.write_text(json.dumps({"groups": [{"positions": 9, "ranks": {"marginal": marginal}}]}))
    text = invoke("tune", engine, "--prompts", prompts, *size, "--statistics", statistics).stdout
    assert f"stored in {engine / TABLE_PATH}" in text and "Predicted" in text
    assert Engine.load.__wrapped__(engine).path == engine


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--batch-sizes", "1,3"], "--batch-sizes 1,3: expected ascending numbers from 1 to 2"),
        (["--batch-sizes", "2,1"], "ascending"),
        (["--batch-sizes", "a"], "expected numbers such as"),
        (["--contexts", "95"], "--contexts 95: expected .* to 94"),
    ],
)
def test_loads_beyond_the_engine_are_refused(tiny_engine, invoke, prompts, flags, message):
    with pytest.raises(ConfigError, match=message):
        invoke("tune", tiny_engine.path, "--prompts", prompts, *flags)
    assert not (tiny_engine.path / TABLE_PATH).exists()


def test_prompts_without_room_are_refused(tiny_engine, invoke, tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text(json.dumps({"prompt": "hello there " * 20}) + "\n")
    with pytest.raises(ConfigError, match="none leaves 64 tokens of 96 free"):
        invoke("tune", tiny_engine.path, "--prompts", file, "--batch-sizes", "1", "--contexts", "20")


def choice(context, gain) -> Choice:
    return Choice(
        batch=2, context=context, tree=chain(2), tokens_per_round=1.5, round_s=0.1,
        tokens_per_s=10.0 * gain, off_tokens_per_s=10.0,
    )  # fmt: skip


@pytest.mark.parametrize(("gain", "kept"), [(1.1, [True, True, True]), (0.97, [False, False, True])])
def test_a_tree_that_loses_its_trial_is_replaced_by_off(gain, kept):
    row = [choice(10, 1.2), choice(20, 1.1), choice(30, 1.3)]
    trial = Trial(
        batch=2, context=10, tree="chain-2", tokens_per_round=1.5, tokens_per_s=10 * gain,
        off_tokens_per_s=10.0, gain=gain, predicted_gain=1.2,
    )  # fmt: skip
    after = _without_losers(row, trial)
    assert [c.tree == chain(2) for c in after] == kept
    for c in after:
        assert c.gain == 1.0 or c.tree != OFF


def test_default_loads_are_within_the_engine():
    assert default_batches(limits(max_batch_size=1)) == (1,)
    assert default_batches(limits(max_batch_size=6)) == (1, 2, 4, 6)
    assert default_batches(limits(max_batch_size=8)) == (1, 2, 4, 8)
    for size, contexts in ((40, (20,)), (600, (256,)), (4096, (256, 1024))):
        small = limits(max_seq_len=size)
        assert default_contexts(small) == contexts
        TuneConfig(batch_sizes=default_batches(small), contexts=contexts).check(small)
