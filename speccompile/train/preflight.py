"""Checks that stop a run which cannot succeed before its first step."""

from __future__ import annotations

from speccompile.model.llama import Llama
from speccompile.train.cache import CacheError, RolloutCache
from speccompile.train.features import FeatureSource
from speccompile.train.schedule import Supervise

_AGREEMENT_SAMPLE = 16
_MIN_AGREEMENT = 0.05


def check_data(source: FeatureSource, target: Llama, supervise: Supervise, max_length: int) -> None:
    """CacheError for a cache that is all held out, has nothing to learn from, or is of another target."""
    cache = source.cache
    if all(r.held_out for r in cache.refs):
        raise CacheError(f"{cache.folder}: all sequences are held out; make more, or lower held_out_percent")
    empty = sum(not supervise(*cache.tokens(r))[2:].any() for r in cache.refs)
    if empty == len(cache.refs):
        raise CacheError(
            f"{cache.folder}: 0 supervised tokens in 100% of {empty} sequences; "
            f"the answer mask is empty, so the chat template does not match the data"
        )
    _check_agreement(cache, source, target, supervise, max_length)


def _check_agreement(
    cache: RolloutCache, source: FeatureSource, target: Llama, supervise: Supervise, max_length: int
) -> None:
    """The features must let the target's ``lm_head`` predict some of the answer tokens.

    Those of another model, or of shifted positions, do not.
    """
    hits = total = 0
    for ref in cache.refs[:: max(1, len(cache.refs) // _AGREEMENT_SAMPLE)]:
        batch = source.batch([ref], max_length, supervise)
        rows = batch.supervised[0, 1:]
        hidden = batch.hidden[0, rows].to(target.lm_head.weight.dtype)
        hits += int((target.lm_head(hidden).argmax(-1) == batch.token[0, 1:][rows]).sum())
        total += int(rows.sum())
    if total and hits < _MIN_AGREEMENT * total:
        raise CacheError(
            f"{cache.folder}: wrong target: its lm_head predicts {hits} of {total} answer tokens from them"
        )
