"""One tiny engine (reference backend, float32), built once through the command line."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

from speccompile.cli.main import cli
from speccompile.runtime.engine import Engine
from tests.build.tiny_pair import write_pair


@dataclass(frozen=True)
class TinyEngine:
    """``path`` of the engine, of what it was built from, and the JSON report of the build."""

    path: Path
    target: Path
    draft: Path
    report: dict


@pytest.fixture(scope="session")
def tiny_engine(tmp_path_factory) -> TinyEngine:
    folder = tmp_path_factory.mktemp("pair")
    target, draft = write_pair(folder)
    recipe = folder / "recipe.yaml"
    recipe.write_text("backend: reference\ndtype: fp32\nmax_batch_size: 2\nmax_seq_len: 64\nthreads: 1\n")
    engine = folder / "engine"
    paths = ["--model", str(target), "--draft", str(draft), "--output", str(engine)]
    command = ["build", "--config", str(recipe), *paths, "--max-seq-len", "96", "--json"]
    result = CliRunner().invoke(cli, command, catch_exceptions=False)
    return TinyEngine(engine, target, draft, json.loads(result.stdout))


@pytest.fixture(scope="session")
def load_once() -> Callable:
    """``Engine.load`` that keeps what it loaded, because loading takes seconds."""
    return functools.cache(Engine.load)


@pytest.fixture
def invoke(monkeypatch, load_once) -> Callable:
    """Run a command line; returns the click result.  Errors of the package are raised."""
    monkeypatch.setattr(Engine, "load", load_once)

    def call(*args: object, stdin: str | None = None):
        return CliRunner().invoke(cli, [str(a) for a in args], input=stdin, catch_exceptions=False)

    return call
