"""Makes the head of a run from its data: fits what is fresh, copies what is warm."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from speccompile.model.eagle import EagleHead
from speccompile.train.cache import SequenceRef
from speccompile.train.config import TrainConfig
from speccompile.train.features import FeatureSource, run_target
from speccompile.train.fusion import Pairs, eagle1_pairs, eagle3_pairs, ridge_map
from speccompile.train.initial import (
    WarmStart,
    empty_head,
    fill_fusion,
    fill_layers,
    fill_warm,
    new_head_config,
    source_layer,
    warm_head_config,
)
from speccompile.train.schedule import training_refs

_FIT_SEQUENCES = 800
_STREAM_SEQUENCES = 200
_RMS_SEQUENCES = 8


def start_head(
    config: TrainConfig, source: FeatureSource, token_ids: Tensor, start: WarmStart | None
) -> EagleHead:
    """A trainable float32 head on the target's device."""
    target, size = source.target, len(token_ids)
    warm = 0 if start is None else start.head.config.num_hidden_layers
    shape = (
        new_head_config(config, target, size)
        if start is None
        else warm_head_config(config, target, start, size)
    )
    head = empty_head(shape, target, token_ids)
    live = config.init_layers == "target"
    # With norms a copy computes what the target does, without any change of scale.
    unit = 1.0 if shape.first_input_norm or not live else _residual_rms(source)
    fill_layers(head, target, config, warm, unit if live else None)
    if start is None:
        stream = live and shape.first_input_norm
        pairs = _stream_pairs(source, config) if stream else _fit_pairs(head, source, config.max_length)
        fc, scale = ridge_map(pairs)
        # Live layers go on from the stream that fc finds; how sure they end is theirs to say.
        fill_fusion(head, fc, target, 1.0 if stream else scale)
    else:
        fill_warm(head, start, token_ids)
    return head.to(target.embed_tokens.weight.device)


def _sample(source: FeatureSource, count: int) -> list[SequenceRef]:
    refs = training_refs(source.cache)
    return refs[:: max(1, len(refs) // count)]


def _fit_pairs(head: EagleHead, source: FeatureSource, max_length: int) -> Pairs:
    refs = _sample(source, _FIT_SEQUENCES)
    batches = (source.batch([ref], max_length, lambda _ids, answer: answer) for ref in refs)
    gain = source.target.norm.weight.float()
    if head.config.kind == "eagle3":
        return eagle3_pairs(gain, ((b.feature[0], b.hidden[0]) for b in batches))
    embed = source.target.embed_tokens.weight
    scale = gain if head.config.first_input_norm else torch.ones_like(gain)
    return eagle1_pairs(embed, ((b.token[0], b.hidden[0], b.hidden[0] / scale) for b in batches))


def _stream_pairs(source: FeatureSource, config: TrainConfig) -> Pairs:
    """Pairs that lead to the stream which the first live layer reads in the target."""
    target = source.target
    layer = source_layer(config, len(target.layers), 0, config.layers)

    def sequences() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for ref in _sample(source, _STREAM_SEQUENCES):
            ids = source.cache.tokens(ref)[0][: config.max_length]
            (found,) = run_target(target, [ids], (layer,))
            yield ids.to(found.hidden.device), found.hidden, found.aux

    return eagle1_pairs(target.embed_tokens.weight, sequences())


@torch.no_grad()
def _residual_rms(source: FeatureSource) -> float:
    """Rms of the target's final residual stream, which its layers' outputs are measured against."""
    seen: list[Tensor] = []

    def see(_norm: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen.append(inputs[0].float().square().mean(-1).flatten())

    hook = source.target.norm.register_forward_pre_hook(see)
    try:
        for ref in _sample(source, _RMS_SEQUENCES):
            run_target(source.target, [source.cache.tokens(ref)[0]], ())
    finally:
        hook.remove()
    # Median: the first position of a text is an outlier by orders of magnitude.
    return float(torch.cat(seen).median().sqrt())
