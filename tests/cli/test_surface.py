"""The command line's surface, frozen: adding or renaming a flag is a deliberate act."""

import dataclasses
import sys

import click
import pytest
from click.testing import CliRunner

from speccompile.build.config import BuildConfig
from speccompile.cli import main
from speccompile.cli.main import COMMANDS, cli
from speccompile.errors import EngineError, SpeccompileError

SAMPLING = {"--max-tokens", "--temperature", "--top-k", "--top-p", "--min-p", "--seed", "--stop", "--tree"}
SURFACE = {
    "build": {
        "--config", "--model", "--draft", "--output", "--backend", "--dtype", "--quantization",
        "--calibration", "--max-batch-size", "--max-seq-len", "--max-rows", "--block-size", "--tree",
        "--max-tree-depth", "--draft-topk", "--threads", "--norm-before-residual",
        "--aux-layers", "--smoke", "--no-smoke", "--json",
    },
    "run": {
        "engine", "-p", "--prompt", "--prompts", "--chat", *SAMPLING, "--no-spec", "--stream",
        "--no-stream", "--json",
    },
    "inspect": {"engine", "--verify", "--json"},
    "verify": {"engine", "--prompts", "--chat", *SAMPLING, "--tolerance", "--json"},
    "demo": {"--output", "--json"},
    "bench": {
        "engines", "--prompts", "--limit", "--max-tokens", "--temperature", "--baselines", "--model",
        "--chat", "--no-chat", "--json",
    },
    "tune": {
        "engine", "--prompts", "--limit", "--statistics", "--batch-sizes", "--contexts", "--max-tokens",
        "--temperature", "--chat", "--no-chat", "--json", "--plot",
    },
    "rollout": {
        "--model", "--prompts", "--output", "--answer-tokens", "--answers", "--batch-size", "--max-answer",
        "--max-user", "--max-length", "--own-prompts", "--second-turns", "--temperatures", "--features",
        "--aux-layers", "--compile", "--once", "--seed", "--dtype", "--json",
    },
    "plot-run": {"runs", "--output", "--by"},
    "train": {
        "--model", "--data", "--output", "--init", "--resume", "--checkpoint-seconds", "--answer-tokens",
        "--format", "--device", "--feature-cache", "--feature-cache-gib", "--kind", "--layers",
        "--aux-layers", "--init-layers", "--from-layers", "--layer-norms", "--draft-vocab-size",
        "--train-lm-head",
        "--steps", "--batch-tokens", "--accumulate", "--max-length", "--unroll", "--decay", "--loss",
        "--loss-top-k", "--feature-weight", "--supervise", "--lr", "--warmup", "--weight-decay", "--clip",
        "--seed", "--dtype", "--held-out-percent", "--eval-sequences", "--json",
    },
    "eval-draft": {
        "--model", "--draft", "--data", "--depth", "--branch", "--tree", "--best-nodes", "--write-tree",
        "--sampling", "--max-texts", "--held-out-percent", "--dtype", "--json", "--plot",
    },
}  # fmt: skip


def flags(name: str) -> set[str]:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    return {text for item in command.params for text in (*item.opts, *item.secondary_opts)}


def test_commands():
    assert list(COMMANDS) == [
        "build", "run", "inspect", "verify", "demo", "bench", "tune", "rollout", "train", "plot-run",
        "eval-draft",
    ]  # fmt: skip


@pytest.mark.parametrize("name", list(SURFACE))
def test_flags(name):
    assert flags(name) == SURFACE[name]


def test_every_build_field_has_its_flag():
    fields = {"--" + f.name.replace("_", "-") for f in dataclasses.fields(BuildConfig)}
    assert fields <= flags("build")


def test_help_needs_no_command_module():
    result = CliRunner().invoke(cli, ["--help"])
    assert result.exit_code == 0
    assert all(name in result.output for name in COMMANDS)
    assert CliRunner().invoke(cli, ["nonsense"]).exit_code == 2


def test_missing_library_names_the_extra(monkeypatch):
    def missing(_name):
        raise ModuleNotFoundError("No module named 'psutil'", name="psutil")

    monkeypatch.setattr(main.importlib, "import_module", missing)
    with pytest.raises(SpeccompileError, match=r"bench: .*'psutil'.*speccompile\[bench\]"):
        cli.get_command(click.Context(cli), "bench")


def test_errors_become_one_line_and_exit_code_2(monkeypatch, capsys):
    def refuse(**_options):
        raise EngineError("the\nreason")

    monkeypatch.setattr(main, "cli", refuse)
    with pytest.raises(SystemExit) as stop:
        main.main()
    assert stop.value.code == 2
    assert capsys.readouterr().err == "error: the reason\n"


def test_real_command_line_error(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["speccompile", "inspect", str(tmp_path / "absent")])
    with pytest.raises(SystemExit) as stop:
        main.main()
    assert stop.value.code == 2
    assert "no such engine directory" in capsys.readouterr().err
