"""Sessions over the table model: ids equal plain decoding whatever the head, tree, batch or chunk."""

from __future__ import annotations

import random

import pytest

from speccompile.errors import RequestError
from speccompile.runtime.params import SamplingParams
from speccompile.tree.named import OFF, chain, named_tree
from tests.runtime import fakes
from tests.runtime.fakes import finish, make_session, plain
from tests.tree.test_tree import random_tree

MC = named_tree("mc_sim_7b_63")
HEADS = [fakes.oracle, fakes.anti, fakes.second, fakes.noisy, fakes.always(3)]


def params(**changes) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 24, "seed": 7, **changes})


def run_one(head, tree, prompt, p, **options):
    session, fake = make_session(head, tree=tree, **options)
    request = session.submit(prompt, p)
    finish(session)
    fake.check_guard()
    return request.completion(), fake


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("tree", [OFF, chain(1), chain(4), MC, named_tree("default")], ids=lambda t: t.name)
@pytest.mark.parametrize("head", HEADS, ids=lambda h: h.__name__)
def test_ids_equal_plain_decoding(head, tree, temperature) -> None:
    p = params(temperature=temperature)
    done, _ = run_one(head, tree, [1, 2, 3], p)
    assert done.token_ids == plain([1, 2, 3], p, 24)
    assert done.finish_reason == "length"
    assert done.text == "".join(chr(97 + t) for t in done.token_ids)
