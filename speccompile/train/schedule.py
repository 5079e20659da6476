"""Which sequences each optimizer step sees: epochs over a growing cache, cut into groups of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from speccompile.train.batches import plan_epoch
from speccompile.train.cache import RolloutCache, SequenceRef
from speccompile.train.checkpoint import Progress
from speccompile.train.config import TrainConfig

MicroBatch = list[SequenceRef]
Supervise = Callable[[Tensor, Tensor], Tensor]


def training_refs(cache: RolloutCache) -> list[SequenceRef]:
    """Every sequence that is not held out."""
    return [r for r in cache.refs if not r.held_out]


def epoch_steps(
    cache: RolloutCache,
    config: TrainConfig,
    progress: Progress,
    agree: Callable[[list[str]], list[str]],
) -> Iterator[list[MicroBatch]]:
    """The optimizer steps left in the current epoch, each up to ``accumulate`` micro-batches.

    A new epoch starts by listing the shards again; ``agree`` makes all processes see one list.
    ``progress`` is moved past a step before it is yielded.
    """
    p, c = progress, config
    p.shards = cache.refresh(agree(p.shards if p.batch else cache.refresh()))
    p.eval_shards = p.eval_shards or p.shards
    plan = plan_epoch(training_refs(cache), c.batch_tokens, c.max_length, c.seed * 100003 + p.epoch)
    for start in range(p.batch, len(plan), c.accumulate):
        p.batch = min(start + c.accumulate, len(plan))
        yield plan[start : p.batch]
    p.epoch, p.batch = p.epoch + 1, 0


def supervised_columns(
    cache: RolloutCache, micro_batches: list[MicroBatch], config: TrainConfig, supervise: Supervise
) -> list[int]:
    """Head columns with a label, by draft step, in all micro-batches of an optimizer step.

    Column i of draft step s is compared at token i+2+s.
    """
    counts = [0] * config.unroll
    for ref in (r for batch in micro_batches for r in batch):
        label = supervise(*cache.tokens(ref))[: min(ref.features, config.max_length) + 1]
        for step in range(config.unroll):
            counts[step] += int(label[2 + step :].sum())
    return counts
