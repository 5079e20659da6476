"""Figures and progress lines: what they hold, and that a missing log or library is named."""

import json
import sys

import numpy as np
import pytest
from click.testing import CliRunner

from speccompile.cli import train_log
from speccompile.cli.eval_draft import command as eval_draft
from speccompile.cli.main import cli
from speccompile.cli.train_log import TrainLog, time_text
from speccompile.errors import ConfigError, SpeccompileError
from speccompile.train.measure import TextGroup, report_group
from speccompile.tree.named import chain, named_tree
from speccompile.tree.replay import RankTable

PNG = b"\x89PNG"


def step(n: int, loss: float = 2.0, accuracy=(0.5, 0.25)) -> dict:
    return {
        "kind": "step", "step": n, "loss": loss, "accuracy": list(accuracy), "tokens": 1000,
        "tokens_per_second": 1234.4, "eta": 3723.0,
    }  # fmt: skip


def evaluation(n: int) -> dict:
    return {
        "kind": "eval", "step": n, "chain": [0.5, 0.2], "chain_length": 1.7, "tree_length": 2.1, "best": True,
    }  # fmt: skip


def write_log(folder, records):
    folder.mkdir()
    (folder / "log.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return folder


def test_runs_of_different_length_are_drawn_together(tmp_path):
    pytest.importorskip("matplotlib")
    long = write_log(tmp_path / "long", [*map(step, range(1, 40)), evaluation(20), evaluation(39)])
    short = write_log(tmp_path / "short", [step(1), step(2)])
    for by in ("steps", "tokens"):
        png = tmp_path / f"{by}.png"
        words = ["plot-run", str(long), str(short), "--by", by, "--output", str(png)]
        assert CliRunner().invoke(cli, words, catch_exceptions=False).exit_code == 0
        assert png.read_bytes()[:4] == PNG


def test_the_axis_counts_steps_or_tokens_and_evaluations_sit_on_it(tmp_path):
    plot = pytest.importorskip("speccompile.train.plot")
    folder = write_log(tmp_path / "run", [step(1), step(2), evaluation(2), step(3)])
    assert plot.read_run(folder, "steps").x == [1, 2, 3]
    run = plot.read_run(folder, "tokens")
    assert run.x == pytest.approx([0.001, 0.002, 0.003]) and run.eval_x == pytest.approx([0.002])
    assert plot.smooth([3.0, 3.0, 3.0]) == pytest.approx([3.0] * 3), "unbiased from the first step"


def test_a_folder_without_a_log_is_named(tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigError, match=r"nothing.log\.jsonl: no steps"):
        cli(["plot-run", str(tmp_path / "nothing"), "--output", "x.png"], standalone_mode=False)


def test_acceptance_is_drawn_for_every_group(tmp_path):
    drawing = pytest.importorskip("speccompile.train.plot_acceptance")
    rng = np.random.default_rng(0)
    rank = rng.choice([0, 0, 1, 2, 255], size=(400, 3)).astype(np.uint8)
    table = RankTable(rank, np.arange(400, 0, -1, dtype=np.int32), np.arange(100, 500, dtype=np.int32))
    trees = [chain(2), named_tree("default")]
    reports = [
        report_group(TextGroup(data="d", temperature=t, texts=1, table=table), trees, 3) for t in (0.0, 0.7)
    ]
    assert [r.law for r in reports] == ["greedy", "T=0.7"]
    drawing.plot_acceptance(reports, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes()[:4] == PNG
    with pytest.raises(SpeccompileError, match="cannot be written"):
        drawing.plot_acceptance(reports, tmp_path / "absent" / "a.png")


def test_a_missing_library_is_named_before_the_work_starts(monkeypatch, tmp_path):
    for name in [n for n in sys.modules if n.startswith("speccompile.train.plot")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    words = ["--model", "absent", "--draft", "absent", "--data", "absent", "--plot", str(tmp_path / "a.png")]
    with pytest.raises(SpeccompileError, match=r"'matplotlib' is not installed; pip install .*\[plot\]"):
        eval_draft(words, standalone_mode=False)


def test_progress_lines(capsys, monkeypatch):
    log = TrainLog(3, as_json=False)
    log(step(1, 4.0))
    log(step(2, 2.0))
    log(evaluation(2))
    monkeypatch.setattr(train_log, "_SECONDS_BETWEEN_LINES", -1.0)
    log(step(3, 4.0, (0.7, 0.25)))
    first, held_out, last = capsys.readouterr().err.splitlines()
    assert first == "step 1/3, loss 4.000, accuracy 0.50/0.25, 1234 tokens/s, 1:02:03 left"
    assert held_out == (
        "step 2: held-out acceptance length 1.70 with a chain of 2 (by depth 0.50 0.20), 2.10 with a tree, "
        "best so far"
    )
    assert last.startswith("step 3/3, loss 3.905, accuracy 0.51/0.25")


def test_json_lines_are_the_records(capsys):
    log = TrainLog(3, as_json=True)
    records = [step(1), evaluation(1)]
    for record in records:
        log(record)
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == records


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (125, "2:05"), (7322, "2:02:02")])
def test_time_text(seconds, text):
    assert time_text(seconds) == text
