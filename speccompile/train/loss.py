"""Distillation losses of an unrolled head against the target's distribution and features.

The teacher's logits are recomputed from the stored post-norm hidden states with the target's own
``lm_head`` rows and renormalised over the draft vocabulary (EAGLE-3, arXiv 2503.01840, section 3).
Legend: B sequences, T columns, S supervised positions, U draft vocabulary, h hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from speccompile.model.eagle import EagleHead
from speccompile.train.batches import Batch
from speccompile.train.unroll import unroll


@dataclass(frozen=True)
class StepResult:
    """Sums over the supervised columns of one draft step."""

    token_loss: Tensor
    feature_loss: Tensor
    correct: Tensor
    count: int


class Teacher:
    """The target's distribution over the draft vocabulary at every supervised position of a batch."""

    def __init__(self, batch: Batch, lm_head: torch.nn.Linear) -> None:
        column = torch.arange(batch.hidden.shape[1])
        self.wanted = batch.supervised[:, 1:] & (column < batch.length[:, None])
        self.row = torch.cumsum(self.wanted.flatten(), 0).view_as(self.wanted) - 1
        self.hidden = batch.hidden
        with torch.no_grad():
            logits = lm_head(batch.hidden[self.wanted].to(lm_head.weight.dtype)).float()
            self.probability_SU = torch.softmax(logits, dim=-1)
        self.best_S = logits.argmax(-1)

    def columns(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Head columns supervised at ``step``: their sequence, column, and teacher row."""
        sequence, position = self.wanted[:, step + 1 :].nonzero(as_tuple=True)
        return sequence, position, self.row[sequence, position + step + 1]


def step_results(head: EagleHead, batch: Batch, steps: int) -> list[StepResult]:
    """Losses of every unrolled step; column i of step s is compared with the target at position i+1+s."""
    teacher = Teacher(batch, head.lm_head)
    feature = batch.feature.to(head.embed_tokens.weight.dtype)
    results = []
    for step, (hidden, scored) in enumerate(unroll(head, batch.token, feature, steps)):
        sequence, column, row = teacher.columns(step)
        logits = head.lm_head(scored[sequence, column].to(head.lm_head.weight.dtype)).float()
        log_q = torch.log_softmax(logits, dim=-1)
        truth = batch.hidden[sequence, column + step + 1].float()
        results.append(
            StepResult(
                token_loss=-(teacher.probability_SU[row] * log_q).sum(),
                feature_loss=F.smooth_l1_loss(hidden[sequence, column].float(), truth, reduction="sum")
                / truth.shape[-1],
                correct=(logits.argmax(-1) == teacher.best_S[row]).sum(),
                count=len(row),
            )
        )
    return results


def total_loss(results: list[StepResult], decay: float, feature_weight: float) -> Tensor:
    """Mean loss per supervised column, step s weighted by ``decay ** s`` (weights sum to 1)."""
    weights = [decay**s for s in range(len(results))]
    terms = [
        w * (r.token_loss + feature_weight * r.feature_loss) / max(1, r.count)
        for w, r in zip(weights, results, strict=True)
    ]
    return torch.stack(terms).sum() / sum(weights)
