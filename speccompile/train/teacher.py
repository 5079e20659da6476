"""The target's distribution at the supervised positions of a batch.

Its logits are recomputed from the post-norm hidden states with the target's own ``lm_head`` rows and
renormalised over the draft vocabulary (EAGLE-3, arXiv 2503.01840, section 3).
Legend: B sequences, T columns, S supervised positions, U draft vocabulary, h hidden size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from speccompile.train.batches import Batch
from speccompile.train.blocks import row_blocks

_KEPT_PROBABILITIES = 2**28


class Teacher:
    """Labels for all draft steps of one batch; ``weight_Uh`` are the target's ``lm_head`` rows."""

    def __init__(self, batch: Batch, weight_Uh: Tensor) -> None:
        column = torch.arange(batch.hidden.shape[1], device=batch.hidden.device)
        self.wanted = batch.supervised[:, 1:] & (column < batch.length[:, None])
        self._row = torch.cumsum(self.wanted.flatten(), 0).view_as(self.wanted) - 1
        self._hidden_Sh, self._weight_Uh = batch.hidden[self.wanted].to(weight_Uh.dtype), weight_Uh
        kept = self._hidden_Sh.shape[0] * len(weight_Uh) <= _KEPT_PROBABILITIES
        self._kept = self._all() if kept else None

    @torch.no_grad()
    def _all(self) -> tuple[Tensor, Tensor]:
        blocks = row_blocks(len(self._hidden_Sh), len(self._weight_Uh))
        p_SU = self._hidden_Sh.new_empty(len(self._hidden_Sh), len(self._weight_Uh), dtype=torch.float32)
        best_S = torch.empty(len(p_SU), dtype=torch.int64, device=p_SU.device)
        for block in blocks:
            p_SU[block], best_S[block] = self._compute(self._hidden_Sh[block])
        return p_SU, best_S

    def _compute(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        logits = (hidden @ self._weight_Uh.T).float()
        return torch.softmax(logits, dim=-1), logits.argmax(-1)

    def columns(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Head columns supervised at draft step ``step``: their sequence, column, and teacher row."""
        sequence, position = self.wanted[:, step + 1 :].nonzero(as_tuple=True)
        return sequence, position, self._row[sequence, position + step + 1]

    def drafted(self, steps: int) -> Tensor:
        """Columns with a label at any of the draft steps, bool [B, T]."""
        later = [F.pad(self.wanted[:, s + 1 :], (0, s + 1)) for s in range(steps)]
        return torch.stack(later).any(0)

    @torch.no_grad()
    def rows(self, row: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities float32 [rows, U] and the likeliest draft id, i64 [rows]."""
        if self._kept is None:
            return self._compute(self._hidden_Sh[row])
        p_SU, best_S = self._kept
        return p_SU[row], best_S[row]
