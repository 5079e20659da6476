"""Token losses against plain formulas, and block-wise gradients against autograd on all logits at once."""

import math

import pytest
import torch

from speccompile.errors import ConfigError
from speccompile.ops.noise import gumbel_noise
from speccompile.train import blocks
from speccompile.train.blocks import blockwise_loss
from speccompile.train.loss import LOSSES, TOP_LOSSES, coupling, parse_loss

P = [[0.5, 0.3, 0.15, 0.05], [0.1, 0.1, 0.1, 0.7]]
Q = [[0.25, 0.25, 0.25, 0.25], [0.2, 0.2, 0.1, 0.5]]


def value(name, k=2):
    return parse_loss(name, k)(torch.tensor(P), torch.tensor(Q).log()).tolist()


def test_values_by_hand():
    log = math.log
    assert value("kl") == pytest.approx([log(4), -(0.2 * log(0.2) + 0.1 * log(0.1) + 0.7 * log(0.5))])
    assert value("greedy") == pytest.approx([log(4), log(2)])
    assert value("topk-kl", 2)[0] == pytest.approx(log(4))
    assert value("topk-kl", 1) == pytest.approx(value("greedy"))
    assert value("tv") == pytest.approx([0.3, 0.2])
    assert value("lk") == pytest.approx([-log(0.7), -log(0.8)])
    assert value("kl:0.7,lk:0.3") == pytest.approx(
        [0.7 * a + 0.3 * b for a, b in zip(value("kl"), value("lk"), strict=True)]
    )


def exact_agreement(p, q):
    return sum(
        1 / sum(max(p[w] / p[v], q[w] / q[v]) for w in range(len(p))) for v in range(len(p)) if p[v] and q[v]
    )


def test_coupling_is_the_agreement_of_draws_with_the_same_noise():
    for p, q, loss in zip(P, Q, value("coupling", 4), strict=True):
        assert math.exp(-loss) == pytest.approx(exact_agreement(p, q), rel=1e-5)
    noise = gumbel_noise(torch.arange(20000)[:, None], torch.tensor(0), torch.arange(4))
    draws = [(torch.tensor(x[0]).log() + noise).argmax(-1) for x in (P, Q)]
    share = (draws[0] == draws[1]).float().mean().item()
    assert share == pytest.approx(exact_agreement(P[0], Q[0]), abs=0.015)


def test_coupling_over_few_tokens_is_close_and_optimistic():
    torch.manual_seed(0)
    p, q = (torch.randn(60).mul(4).softmax(-1) for _ in range(2))
    exact = exact_agreement(p.tolist(), q.tolist())
    few = math.exp(-coupling(p[None], q[None].log(), 12).item())
    assert exact <= few + 1e-6
    assert few == pytest.approx(exact, rel=0.25)


def test_equal_distributions_are_a_minimum():
    p = torch.tensor(P)
    for name in ("tv", "lk", "coupling"):
        assert parse_loss(name, 4)(p, p.log()).abs().max() < 1e-4


@pytest.mark.parametrize("name", [*LOSSES, *TOP_LOSSES])
def test_gradients_stay_finite_where_probabilities_vanish(name):
    p = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
    logits = torch.tensor([[-200.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 200.0]], requires_grad=True)
    loss = parse_loss(name, 3)(p, logits.log_softmax(-1)).sum()
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("text", ["", "kl,", "ce", "kl:x", "kl:0", "kl:-1", "kl:inf", "kl:nan", "kl 0.5"])
def test_odd_loss_texts_are_refused(text):
    with pytest.raises(ConfigError, match="loss"):
        parse_loss(text, 4)


@pytest.mark.parametrize("own", [True, False])
def test_blocks_give_the_gradients_of_all_logits(own, monkeypatch):
    monkeypatch.setattr(blocks, "_BLOCK_LOGITS", 3 * 11)
    torch.manual_seed(0)
    scored, weight = torch.randn(10, 5, requires_grad=True), torch.randn(11, 5, requires_grad=own)
    label = torch.randint(0, 11, (10,))
    whole = 0.7 * torch.nn.functional.cross_entropy(scored @ weight.T, label, reduction="sum")
    inputs = [scored, weight] if own else [scored]
    expected = torch.autograd.grad(whole, inputs)
    seen = []

    def loss(logits, block):
        seen.append(len(logits))
        return torch.nn.functional.cross_entropy(logits, label[block], reduction="sum")

    got = 0.7 * blockwise_loss(scored, weight, loss)
    torch.testing.assert_close(got, whole)
    assert seen == [3, 3, 3, 1]
    for a, b in zip(torch.autograd.grad(got, inputs), expected, strict=True):
        torch.testing.assert_close(a, b)
    with torch.no_grad():
        torch.testing.assert_close(0.7 * blockwise_loss(scored, weight, loss), whole)
