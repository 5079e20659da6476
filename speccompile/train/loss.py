"""Token losses: how far the head's distribution is from the target's at one drafted position.

Every loss is a function of ``p_SU``, the target's probabilities over the draft vocabulary (renormalised
there), and ``log_q_SU``, the head's log-probabilities, both float32; it returns one value per row, [S].
``LOSSES`` and ``TOP_LOSSES`` (those that look at ``k`` tokens) name them for ``--loss``. Legend: S
supervised positions, U draft vocabulary, K tokens looked at.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from speccompile.errors import ConfigError

TokenLoss = Callable[[Tensor, Tensor], Tensor]

_SMALLEST_LOG = -60.0


def soft_cross_entropy(p_SU: Tensor, log_q_SU: Tensor) -> Tensor:
    """Cross-entropy against the whole distribution, the loss of EAGLE (arXiv 2401.15077, section 3.2).

    Its gradient is that of KL(p || q).
    """
    return -(p_SU * log_q_SU).sum(-1)


def top_cross_entropy(p_SU: Tensor, log_q_SU: Tensor, k: int) -> Tensor:
    """Cross-entropy against the target's ``k`` likeliest tokens, renormalised (top-K distillation as in HASS,
    arXiv 2408.15766, section 3.1)."""
    top_SK, token_SK = p_SU.topk(min(k, p_SU.shape[-1]), dim=-1)
    return -(top_SK * log_q_SU.gather(-1, token_SK)).sum(-1) / top_SK.sum(-1)


def greedy_cross_entropy(p_SU: Tensor, log_q_SU: Tensor) -> Tensor:
    """Cross-entropy against the target's likeliest token: what greedy decoding accepts."""
    return -log_q_SU.gather(-1, p_SU.argmax(-1, keepdim=True)).squeeze(-1)


def total_variation(p_SU: Tensor, log_q_SU: Tensor) -> Tensor:
    """1 - sum min(p, q): the rejection rate of speculative sampling (arXiv 2211.17192, section 3)."""
    return 1 - torch.minimum(p_SU, log_q_SU.exp()).sum(-1)


def negative_log_acceptance(p_SU: Tensor, log_q_SU: Tensor) -> Tensor:
    """-log sum min(p, q): the same acceptance rate, with a gradient that does not fade where it is small."""
    return -torch.minimum(p_SU, log_q_SU.exp()).sum(-1).clamp(min=1e-6).log()


def coupling(p_SU: Tensor, log_q_SU: Tensor, k: int) -> Tensor:
    """-log of the probability that target and head draw the same token from the same Gumbel noise.

    That is P = sum_v 1 / sum_w max(p_w / p_v, q_w / q_v): token v wins both exponential races when its clock
    beats every other one in the stricter of the two.  ``k`` tokens, the likeliest under either, are exact;
    the others count as one more token, which bounds P from above.
    """
    with torch.no_grad():
        token_SK = torch.maximum(p_SU, log_q_SU.exp()).topk(min(k, p_SU.shape[-1]), dim=-1).indices
    p_SK, log_q_SK = p_SU.gather(-1, token_SK), log_q_SU.gather(-1, token_SK)
    log_p, log_q = (_with_rest(x) for x in (p_SK.log(), log_q_SK))
    race = torch.maximum(log_p[:, None] - log_p[..., None], log_q[:, None] - log_q[..., None])
    return -torch.logsumexp(-torch.logsumexp(race, dim=-1), dim=-1)


def _with_rest(log_SK: Tensor) -> Tensor:
    """Log-probabilities with one more column for all other tokens; zero becomes tiny, so ratios stay
    finite."""
    rest = torch.log((1 - log_SK.exp().sum(-1, keepdim=True)).clamp(min=1e-12))
    return torch.cat((log_SK, rest), dim=-1).clamp(min=_SMALLEST_LOG)


LOSSES: dict[str, TokenLoss] = {
    "kl": soft_cross_entropy,
    "greedy": greedy_cross_entropy,
    "tv": total_variation,
    "lk": negative_log_acceptance,
}
TOP_LOSSES: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "topk-kl": top_cross_entropy,
    "coupling": coupling,
}


def parse_loss(text: str, k: int) -> TokenLoss:
    """``kl`` or a mixture such as ``kl:0.7,lk:0.3`` as one loss; ConfigError for anything else."""
    known = {**LOSSES, **{name: _looking_at(k, loss) for name, loss in TOP_LOSSES.items()}}
    parts: list[tuple[float, TokenLoss]] = []
    for item in text.split(","):
        name, _, weight = item.strip().partition(":")
        if name not in known:
            raise ConfigError(f"loss {text!r}: {name!r} is none of {', '.join(sorted(known))}")
        parts.append((_weight(text, weight), known[name]))

    def mixture(p_SU: Tensor, log_q_SU: Tensor) -> Tensor:
        return torch.stack([weight * loss(p_SU, log_q_SU) for weight, loss in parts]).sum(0)

    return mixture


def _looking_at(k: int, loss: Callable[[Tensor, Tensor, int], Tensor]) -> TokenLoss:
    return lambda p_SU, log_q_SU: loss(p_SU, log_q_SU, k)


def _weight(text: str, weight: str) -> float:
    try:
        value = float(weight or 1.0)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise ConfigError(f"loss {text!r}: weight {weight!r} must be a positive number, as in kl:0.7,lk:0.3")
    return value
