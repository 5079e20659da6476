"""Sampling parameters: defaults, validation by field name, resolution of the tree."""

from __future__ import annotations

import pytest

from speccompile.errors import RequestError
from speccompile.runtime.params import SamplingParams, fresh_seed
from speccompile.tree.named import OFF, chain


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", 1.1),
        ("min_p", -0.1),
        ("seed", -1),
        ("seed", 2**63),
        ("seed", "7"),
        ("stop", [""]),
        ("stop", ""),
        ("stop", [3]),
        ("stop", 3),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", 3),
        ("ignore_eos", 1),
        ("speculation", "chain-0"),
        ("speculation", [[0, 0]]),
        ("speculation", None),
    ],
)
def test_bad_values_name_the_field(field, value) -> None:
    with pytest.raises(RequestError, match=field):
        SamplingParams(**{field: value})


def test_unknown_field_is_an_error() -> None:
    with pytest.raises(TypeError):
        SamplingParams(temprature=1.0)


def test_speculation_resolves_to_a_tree() -> None:
    assert SamplingParams().tree(chain(3)) == chain(3)
    assert SamplingParams(speculation="off").tree(chain(3)) == OFF
    assert SamplingParams(speculation="chain-2").tree(OFF) == chain(2)
    assert SamplingParams(speculation=[[0], [0, 0]]).tree(OFF) == chain(2)
    assert SamplingParams(speculation=chain(5)).tree(OFF) == chain(5)


def test_one_stop_string_is_a_list_of_one_and_fresh_seeds_differ() -> None:
    assert SamplingParams(stop="ab").stop_strings == ("ab",)
    assert len({fresh_seed() for _ in range(20)}) == 20
