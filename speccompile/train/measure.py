"""What a head accepts on rollout caches: ranks collected once, then trees compared by data and law.

Texts are grouped by data set and sampling temperature.  A text counts only if the target draws it again
under its law; a text that was sampled without a recorded seed cannot be replayed and is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from speccompile.model.eagle import EagleHead
from speccompile.train.batches import Batch, plan_epoch, supervision
from speccompile.train.cache import SequenceRef
from speccompile.train.evaluate import (
    RankShares,
    TreeResult,
    greedy_mask,
    rank_shares,
    sampled_mask,
    tree_result,
)
from speccompile.train.features import FeatureSource
from speccompile.train.ranks import SamplingLaw, rank_sequences
from speccompile.tree.replay import RankTable, join_tables
from speccompile.tree.tree import Tree

BATCH_TOKENS, MAX_LENGTH = 1024, 4096


@dataclass(frozen=True, kw_only=True)
class RankConfig:
    """``depth`` drafts and ``width`` candidates per node are ranked; ``max_texts`` per cache (0: all)."""

    depth: int
    width: int
    max_texts: int = 0
    greedy: bool = True
    sampled: bool = True


@dataclass(frozen=True, kw_only=True)
class TextGroup:
    """Texts of one data set drawn at one temperature (0.0: greedy), and their ranks."""

    data: str
    temperature: float
    texts: int
    table: RankTable


@dataclass(frozen=True, kw_only=True)
class GroupReport:
    """Acceptance on one group: every tree, and the ranks of accepted drafts by depth."""

    data: str
    temperature: float
    texts: int
    positions: int
    trees: tuple[TreeResult, ...]
    ranks: RankShares

    @property
    def law(self) -> str:
        """``greedy`` or such as ``T=0.7``."""
        return f"T={self.temperature:g}" if self.temperature else "greedy"


def collect_ranks(
    name: str,
    source: FeatureSource,
    refs: list[SequenceRef],
    head: EagleHead,
    token_ids: Tensor,
    config: RankConfig,
    progress: Callable[[list[list[SequenceRef]]], Iterable[list[SequenceRef]]] = iter,
) -> tuple[list[TextGroup], int]:
    """The groups of one data set, and how many texts were left out because no law draws them."""
    wanted = [r for r in refs if (config.sampled if r.temperature else config.greedy)]
    if config.max_texts:
        wanted = wanted[:: max(1, -(-len(wanted) // config.max_texts))]
    eos_ids = torch.tensor(source.target.config.eos_token_ids, dtype=torch.int64)
    tables: dict[float, list[RankTable]] = {}
    for part in progress(plan_epoch(wanted, BATCH_TOKENS, MAX_LENGTH, 0) if wanted else []):
        batch = source.batch(part, MAX_LENGTH, lambda ids, answer: supervision(ids, answer, eos_ids, False))
        law = _law(part, batch.token.device)
        own = _replayable(part, batch, source.target.lm_head, law)
        chosen = own.nonzero()[:, 0]
        for index, table in zip(
            chosen.tolist(), _ranked(head, token_ids, batch, chosen, law, config), strict=True
        ):
            tables.setdefault(part[index].temperature or 0.0, []).append(table)
    groups = [
        TextGroup(data=name, temperature=t, texts=len(found), table=join_tables(found, config.depth))
        for t, found in sorted(tables.items())
    ]
    return groups, len(wanted) - sum(g.texts for g in groups)


def _law(refs: list[SequenceRef], device: torch.device) -> SamplingLaw:
    temperature = torch.tensor([r.temperature or 0.0 for r in refs], device=device)
    return SamplingLaw(temperature, torch.tensor([r.seed or 0 for r in refs], device=device))


def _replayable(refs: list[SequenceRef], batch: Batch, lm_head: torch.nn.Linear, law: SamplingLaw) -> Tensor:
    """Which texts of the batch their target draws under their law, bool [B]."""
    greedy = law.temperature == 0
    seeded = torch.tensor([r.seed is not None for r in refs], device=greedy.device)
    own = greedy & greedy_mask(batch, lm_head)
    if (seeded & ~greedy).any():
        own |= seeded & ~greedy & sampled_mask(batch, lm_head, law)
    return own


def _ranked(
    head: EagleHead, token_ids: Tensor, batch: Batch, chosen: Tensor, law: SamplingLaw, config: RankConfig
) -> list[RankTable]:
    if not len(chosen):
        return []
    rows = replace(batch, **{field: getattr(batch, field)[chosen] for field in vars(batch)})
    part = SamplingLaw(law.temperature[chosen], law.seed[chosen])
    return rank_sequences(head, token_ids, rows, config.depth, config.width, part)


def report_group(group: TextGroup, trees: Iterable[Tree], branch: int) -> GroupReport:
    """Replays every tree over the group's texts."""
    return GroupReport(
        data=group.data,
        temperature=group.temperature,
        texts=group.texts,
        positions=len(group.table),
        trees=tuple(tree_result(group.table, tree) for tree in trees),
        ranks=rank_shares(group.table, branch),
    )
