"""The losses of one micro-batch over all unrolled draft steps.

Column i of step s is compared with the target at position i+1+s.  EAGLE-1 adds its feature regression (smooth
L1, arXiv 2401.15077, section 3.2); EAGLE-3 has none (arXiv 2503.01840, section 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from speccompile.model.eagle import EagleHead
from speccompile.train.batches import Batch
from speccompile.train.blocks import blockwise_loss
from speccompile.train.loss import TokenLoss
from speccompile.train.teacher import Teacher
from speccompile.train.unroll import unroll


@dataclass(frozen=True)
class StepResult:
    """Sums over the supervised columns of one draft step; scalars.  ``feature_loss`` is a mean over h."""

    token_loss: Tensor
    feature_loss: Tensor
    correct: Tensor
    count: int


def step_results(
    head: EagleHead, batch: Batch, steps: int, loss: TokenLoss, teacher_weight_Uh: Tensor
) -> list[StepResult]:
    """Losses of every unrolled step; ``teacher_weight_Uh`` are the target's ``lm_head`` rows."""
    teacher = Teacher(batch, teacher_weight_Uh)
    feature = batch.feature.to(head.embed_tokens.weight.dtype)
    drafts = unroll(head, batch.token, feature, steps, teacher.drafted(steps))
    results = []
    for step, (hidden, scored) in enumerate(drafts):
        sequence, column, row = teacher.columns(step)
        token_loss, correct = _token_loss(scored[sequence, column], head.lm_head.weight, teacher, row, loss)
        feature_loss = torch.zeros_like(token_loss)
        if head.config.kind == "eagle1":
            truth = batch.hidden[sequence, column + step + 1].float()
            distance = F.smooth_l1_loss(hidden[sequence, column].float(), truth, reduction="sum")
            feature_loss = distance / truth.shape[-1]
        results.append(StepResult(token_loss, feature_loss, correct, len(row)))
    return results


def _token_loss(
    scored_Sh: Tensor, weight_Uh: Tensor, teacher: Teacher, row: Tensor, loss: TokenLoss
) -> tuple[Tensor, Tensor]:
    """Sum of the losses, and how many rows have the target's likeliest token in front."""
    correct = torch.zeros((), dtype=torch.int64, device=scored_Sh.device)

    def block_loss(logits: Tensor, block: slice) -> Tensor:
        p, best = teacher.rows(row[block])
        correct.add_((logits.detach().argmax(-1) == best).sum())
        return loss(p, torch.log_softmax(logits, dim=-1)).sum()

    with torch.autocast(scored_Sh.device.type, enabled=False):
        return blockwise_loss(scored_Sh, weight_Uh, block_loss), correct


def total_loss(
    results: list[StepResult], counts: Sequence[int], decay: float, feature_weight: float
) -> Tensor:
    """Loss per supervised column of the whole optimizer step, draft step s weighted by ``decay ** s``.

    ``counts`` are the columns of all its micro-batches, so that their losses simply add up.
    """
    weights = [decay**s for s in range(len(results))]
    terms = [
        w * (r.token_loss + feature_weight * r.feature_loss) / max(1, n)
        for w, r, n in zip(weights, results, counts, strict=True)
    ]
    return torch.stack(terms).sum() / sum(weights)
