"""Tree tables: which cell serves which load, and their JSON form."""

from __future__ import annotations

import json

import pytest

from speccompile.errors import ConfigError
from speccompile.tree.named import OFF, chain, named_tree
from speccompile.tree.table import TreeTable, table_from_json, table_of_one

TABLE = TreeTable((1, 4), (256, 1024), ((named_tree("deep-15"), chain(3)), (chain(1), OFF)))


@pytest.mark.parametrize(
    ("active", "context", "name"),
    [
        (1, 0, "deep-15"),
        (1, 256, "deep-15"),
        (1, 256.5, "chain-3"),
        (1, 9999, "chain-3"),
        (2, 10, "chain-1"),
        (4, 10, "chain-1"),
        (99, 10, "chain-1"),
        (3, 400, "off"),
    ],
)
def test_a_load_between_two_cells_counts_as_the_heavier(active, context, name):
    assert TABLE.pick(active, context).name == name


def test_what_a_table_holds():
    assert [tree.name for tree in TABLE.trees] == ["deep-15", "chain-3", "chain-1", "off"]
    assert (TABLE.max_rows, TABLE.speculates) == (16, True)
    assert not table_of_one(OFF).speculates
    assert table_of_one(chain(2)).pick(7, 1e6) == chain(2)


def test_json_round_trip():
    again = table_from_json(json.loads(json.dumps(TABLE.to_json())))
    assert again == TABLE
    assert again.pick(1, 1).name == "deep-15"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": [4, 1]}, "batch must be ascending"),
        ({"batch": [0, 1]}, "from 1"),
        ({"context": []}, "context must be ascending"),
        ({"context": [1.5, 2]}, "context must be a list of whole numbers"),
        ({"cells": [[]]}, "2 rows of 2 trees"),
        ({"cells": 3}, "list of lists"),
        ({"more": 1}, "exactly the keys"),
    ],
)
def test_wrong_tables_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        table_from_json({**TABLE.to_json(), **changes})
