"""The table inside an engine directory: stored, replaced, damaged, foreign."""

from __future__ import annotations

import json

import pytest

from speccompile.build.engine_dir import load_engine_dir, publish
from speccompile.build.table_file import TABLE_PATH, read_table, write_table
from speccompile.errors import EngineError
from speccompile.tree.named import OFF, chain
from speccompile.tree.table import TreeTable
from tests.build.test_engine_dir import write_engine

TABLE = TreeTable((1, 4), (256,), ((chain(3),), (OFF,)))


@pytest.fixture
def engine(tmp_path):
    publish(tmp_path / "engine", write_engine)
    return load_engine_dir(tmp_path / "engine")


def test_round_trip_and_replacement_without_a_rebuild(engine):
    assert engine.table() is None and read_table(engine.path, engine.manifest) is None
    before = (engine.path / "manifest.json").read_bytes()
    write_table(engine.path, engine.manifest, TABLE, {"choices": [(1, 2.5)]})
    assert engine.table() == TABLE
    assert read_table(engine.path, engine.manifest) == (TABLE, {"choices": [[1, 2.5]]})
    other = TreeTable((1,), (9,), ((OFF,),))
    write_table(engine.path, engine.manifest, other, {})
    assert load_engine_dir(engine.path, verify=True).table() == other
    assert (engine.path / "manifest.json").read_bytes() == before
    assert sorted(p.name for p in (engine.path / "trees").iterdir()) == ["t.json", "table.json"]


def test_a_rebuilt_engine_has_no_table(engine):
    write_table(engine.path, engine.manifest, TABLE, {})
    publish(engine.path, lambda folder: write_engine(folder, "two"))
    assert load_engine_dir(engine.path).table() is None


def edited(**changes):
    def edit(text: str) -> str:
        return json.dumps({**json.loads(text), **changes})

    return edit


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[: len(text) // 2], "cannot be read"),
        (lambda _text: "[]", "not a tree table"),
        (edited(format=2), "not a tree table of format 1"),
        (edited(more=1), "not a tree table"),
        (edited(table={}), "digest differs"),
        (lambda text: text.replace('"chain-3"', '"chain-4"'), "digest differs"),
    ],
)
def test_a_damaged_table_is_named_with_the_remedy(engine, damage, message):
    write_table(engine.path, engine.manifest, TABLE, {})
    path = engine.path / TABLE_PATH
    path.write_text(damage(path.read_text()))
    with pytest.raises(EngineError, match=rf"table\.json: .*{message}.*tune` again, or remove"):
        engine.table()
    write_table(engine.path, engine.manifest, TABLE, {})
    assert engine.table() == TABLE, "tuning again repairs it"


def test_a_table_of_another_engine_is_refused(engine, tmp_path):
    publish(tmp_path / "other", lambda folder: write_engine(folder, "two"))
    other = load_engine_dir(tmp_path / "other")
    write_table(other.path, other.manifest, TABLE, {})
    (engine.path / TABLE_PATH).write_bytes((other.path / TABLE_PATH).read_bytes())
    with pytest.raises(EngineError, match=r"table\.json: tuned for another engine"):
        engine.table()


def test_a_failed_write_keeps_the_old_table(engine, monkeypatch):
    write_table(engine.path, engine.manifest, TABLE, {})

    def full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("speccompile.build.table_file.os.fsync", full)
    with pytest.raises(EngineError, match=r"table\.json: cannot be written"):
        write_table(engine.path, engine.manifest, TreeTable((1,), (9,), ((OFF,),)), {})
    assert engine.table() == TABLE
    assert sorted(p.name for p in (engine.path / "trees").iterdir()) == ["t.json", "table.json"]
