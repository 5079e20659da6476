"""Acceptance: replayed rounds against drafting step by step, as the engine does."""

import torch

from speccompile.train.evaluate import greedy_rows, measure_acceptance
from speccompile.train.features import FeatureSource
from tests.model.dense import dense_causal_attend
from tests.train.test_loss import live_head
from tests.train.tiny import tiny_cache, tiny_target


def drafted(head, ids, token, feature, column, depth):
    """Number of greedy chain drafts after ``column`` that equal the text."""
    tokens, hiddens = [token[1 : column + 2]], [feature[: column + 1]]
    for step in range(depth):
        joined = torch.cat(tokens)
        fed, scored = head(joined, torch.cat(hiddens), torch.arange(len(joined)), dense_causal_attend)
        guess = ids[head.lm_head(scored[-1]).argmax()]
        if guess != token[column + 2 + step]:
            return step
        tokens.append(guess[None])
        hiddens.append(fed[-1:])
    return depth


def test_a_replayed_chain_equals_drafting_round_by_round(tmp_path):
    target = tiny_target()
    cache = tiny_cache(tmp_path, target)
    head, ids = live_head(target, draft_vocab=48)
    with torch.no_grad():  # a head that is often right: it repeats the feature, as does a text in a loop
        head.fc.weight.copy_(torch.cat((torch.zeros(32, 32), torch.eye(32)), dim=1))
    batch = greedy_rows(FeatureSource(target, cache).batch(cache.refs, 64, lambda _i, a: a), target.lm_head)
    depth, rounds = 2, []
    with torch.no_grad():
        for b in range(len(batch.token)):
            n = int(batch.length[b])
            token, feature, label = batch.token[b, : n + 1], batch.hidden[b, :n], batch.supervised[b, : n + 1]
            column = int(label.nonzero()[0]) - 1  # the first token comes out of the prompt's call
            while column + 2 <= n:
                rounds.append(drafted(head, ids, token, feature, column, min(depth, n - 1 - column)))
                column += rounds[-1] + 1
    result = measure_acceptance(head, ids, [batch], depth=depth)
    assert result.rounds == len(rounds) > 10
    assert result.chain == tuple(sum(r > d for r in rounds) / len(rounds) for d in range(depth))
    assert result.tree[0] >= result.chain[0]
    assert 1 <= result.chain_length <= result.tree_length
