"""Rank vectors: against the runtime's candidates, and what they predict against what a session accepts."""

import dataclasses

import pytest
import torch

from speccompile import ops
from speccompile.runtime.params import SamplingParams
from speccompile.train.batches import Batch
from speccompile.train.ranks import SamplingLaw, rank_sequences, token_ranks
from speccompile.tree.named import chain, named_tree
from speccompile.tree.replay import NOT_DRAFTED, replay, walk_tree
from tests.model.dense import dense_causal_attend
from tests.runtime.fakes import finish
from tests.runtime.graph import EAGLE1, EAGLE3, LIMITS, VOCAB, tiny


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_ranks_are_places_in_the_order_of_draft_topk(temperature):
    torch.manual_seed(0)
    rows, ids = 40, torch.tensor([9, 2, 30, 4, 17, 11])
    logits = torch.randn(rows, len(ids)).mul(2).round().div(2)  # many ties
    token = ids[torch.arange(rows) % len(ids)]
    position, seed = torch.arange(rows) + 5, torch.arange(rows) % 3
    law = SamplingLaw(torch.full((rows,), temperature), seed)
    order = ops.draft_topk(logits, ids, seed, position, law.temperature, len(ids))
    expected = (order == token[:, None]).int().argmax(1)
    assert torch.equal(token_ranks(logits, ids, token, position, law), expected)
    outside = token_ranks(logits, ids, torch.full((rows,), 3), position, law)
    assert (outside == NOT_DRAFTED).all()


def text_batch(graph, tokens: list[int], prompt: int) -> Batch:
    """One text as a batch; its answer, from ``prompt`` on, is supervised."""
    ids = torch.tensor(tokens)
    position = torch.arange(len(ids) - 1)
    aux = graph.head.config.aux_layers
    with torch.no_grad():
        hidden, feature = graph.target(ids[:-1], position, dense_causal_attend, aux)
    answer = torch.arange(len(ids)) >= prompt
    return Batch(ids[None], answer[None], hidden[None], feature[None], torch.tensor([len(position)]))


@pytest.mark.parametrize("head", [EAGLE1, EAGLE3], ids=lambda h: h.kind)
@pytest.mark.parametrize("tree", [chain(3), named_tree("mc_sim_7b_63")], ids=lambda t: t.name)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_prediction_equals_what_a_session_accepts(head, tree, temperature):
    """Per request: rounds, kept tokens and accepted drafts by depth, to the text's end token."""
    graph = tiny(head, tree)
    accepted = 0
    for seed, prompt in enumerate([[3, 1, 4, 1, 5, 9, 2, 6], [7], [t % VOCAB for t in range(17)]]):
        p = SamplingParams(max_tokens=30, temperature=temperature, seed=seed)
        text = graph.plain(prompt, p)
        stop = max(set(text), key=text.index)  # the token that appears last for the first time
        request = graph.session.submit(prompt, dataclasses.replace(p, max_tokens=45, stop_token_ids=[stop]))
        finish(graph.session)
        done = request.completion()
        assert done.token_ids == text[: text.index(stop) + 1]
        law = SamplingLaw(torch.tensor([temperature]), torch.tensor([seed]))
        batch = text_batch(graph, prompt + done.token_ids, len(prompt))
        ranks = rank_sequences(graph.head, graph.token_ids, batch, tree.depth, LIMITS.draft_topk, law)
        rounds = replay(ranks[0], walk_tree(ranks[0], tree))
        assert len(rounds) == done.rounds
        assert rounds.kept.sum() == done.completion_tokens - 1, "the prompt's call brings the first token"
        assert rounds.acceptance_length == pytest.approx(done.acceptance_length)
        by_depth = list(rounds.reached(tree.depth))
        assert [share for share in by_depth if share] == pytest.approx(done.acceptance_by_depth)
        accepted += int(rounds.accepted.sum())
    assert accepted >= 3, "nothing was accepted, so nothing was tested"


def test_rounds_of_two_turns_and_unsupervised_tokens():
    """Answers at tokens 3-5 and 8-9: roots 3, 4 and 8; nothing is drafted across the user's turn."""
    graph = tiny(EAGLE1, chain(3))
    batch = text_batch(graph, [t % VOCAB for t in range(12)], 3)
    answer = torch.tensor([[0, 0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 0]]).bool()
    table = rank_sequences(
        graph.head, graph.token_ids, dataclasses.replace(batch, supervised=answer), 3, VOCAB
    )[0]
    assert table.position.tolist() == [3, 4, 8]
    assert table.left.tolist() == [2, 1, 1]
    drafted = table.rank != NOT_DRAFTED
    assert drafted.sum(1).tolist() == [2, 1, 1]


def test_ranks_below_the_width_end_a_path():
    graph = tiny(EAGLE1, chain(3))
    batch = text_batch(graph, [t % VOCAB for t in range(30)], 2)
    full = rank_sequences(graph.head, graph.token_ids, batch, 3, VOCAB)[0].rank
    cut = rank_sequences(graph.head, graph.token_ids, batch, 3, 2)[0].rank
    kept = (full < 2).cumprod(1).astype(bool)
    assert (cut[kept] == full[kept]).all()
    assert (cut[~kept] == NOT_DRAFTED).all()
    assert 0 < kept.sum() < kept.size


def test_a_text_shorter_than_the_depth():
    graph = tiny(EAGLE1, chain(3))
    table = rank_sequences(graph.head, graph.token_ids, text_batch(graph, [1, 2, 3], 1), 6, VOCAB)[0]
    assert (table.rank[:, 1:] == NOT_DRAFTED).all() and len(table) == 1


def test_a_text_without_an_answer_has_no_rounds():
    graph = tiny(EAGLE1, chain(3))
    batch = text_batch(graph, [1, 2, 3, 4], 4)
    assert len(rank_sequences(graph.head, graph.token_ids, batch, 3, VOCAB)[0]) == 0
