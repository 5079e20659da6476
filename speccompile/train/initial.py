"""The head a training run starts from: fresh, or an existing one fitted to this run.

A fresh layer is shaped like one of the target's.  ``silent``: its output projections are zero, so that the
head starts as its linear ``fc`` (:mod:`speccompile.train.fusion`).  ``target``: it is a live copy in the
head's coordinates.  An EAGLE-1 head works on post-norm features and an EAGLE-3 head on the final residual at
unit scale, so weights that read or write the residual stream are rescaled by the final norm's gain (1 for
EAGLE-3) and by the residual's rms.  An EAGLE-1 head with layer norms works on the target's own stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from speccompile.checkpoint.config import HeadConfig
from speccompile.checkpoint.head_aux import check_aux_layers, default_aux_layers
from speccompile.errors import CheckpointError, ConfigError
from speccompile.model.eagle import EagleHead
from speccompile.model.llama import Llama
from speccompile.model.rotary import inverse_frequencies
from speccompile.train.config import TrainConfig

_SMALLEST_GAIN = 0.05


@dataclass(frozen=True)
class WarmStart:
    """A loaded head and the target ids of its draft vocabulary, i64 [U]."""

    head: EagleHead
    token_ids: Tensor


def head_aux_layers(config: TrainConfig, target: Llama, start: WarmStart | None) -> tuple[int, ...]:
    """The layers whose inputs the head reads: those asked for, the warm start's, or the default; () for
    EAGLE-1."""
    if config.kind == "eagle1":
        return ()
    count = target.config.num_hidden_layers
    asked = config.layer_list("aux_layers")
    if not asked and start is not None:
        asked = start.head.config.aux_layers
    try:
        layers = check_aux_layers(asked or default_aux_layers(count, Path("target")), "--aux-layers")
    except CheckpointError as error:
        raise ConfigError(f"aux_layers: {error}") from error
    if layers[-1] >= count:
        raise ConfigError(f"aux_layers {list(layers)}: the target has layers 0 to {count - 1}")
    return layers


def new_head_config(config: TrainConfig, target: Llama, draft_vocab_size: int) -> HeadConfig:
    """A head with the target's own sizes and rope that shares its embedding."""
    c, normed = target.config, config.layer_norms == "yes"
    return HeadConfig(
        kind="eagle3" if config.kind == "eagle3" else "eagle1",
        num_hidden_layers=config.layers,
        hidden_size=c.hidden_size,
        target_hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        rms_norm_eps=c.rms_norm_eps,
        rope=c.rope,
        vocab_size=c.vocab_size,
        draft_vocab_size=draft_vocab_size,
        aux_layers=head_aux_layers(config, target, None),
        attention_bias=c.attention_bias,
        mlp_bias=c.mlp_bias,
        first_input_norm=normed,
        final_norm=config.kind == "eagle3" or normed,
        norm_feedback=normed,
        own_lm_head=config.owns_lm_head,
    )


def warm_head_config(
    config: TrainConfig, target: Llama, start: WarmStart, draft_vocab_size: int
) -> HeadConfig:
    """The warm start's config with this run's layers and vocabulary; ConfigError where they cannot meet."""
    old = start.head.config
    if old.kind != config.kind:
        raise ConfigError(
            f"--init: that head is {old.kind}, this run trains {config.kind}; give --kind {old.kind}"
        )
    if old.num_hidden_layers > config.layers:
        raise ConfigError(
            f"--init: that head has {old.num_hidden_layers} layers, more than --layers {config.layers}"
        )
    if old.aux_layers != head_aux_layers(config, target, start):
        raise ConfigError(
            f"--init: that head reads aux layers {list(old.aux_layers)}; leave --aux-layers out"
        )
    if old.hidden_size != target.config.hidden_size:
        raise ConfigError(
            f"--init: that head is {old.hidden_size} wide, the target {target.config.hidden_size}; "
            f"heads of another width cannot be trained"
        )
    if old.own_lm_head and not config.owns_lm_head:
        raise ConfigError("--init: that head has an lm_head of its own; give --train-lm-head yes")
    return replace(
        old,
        num_hidden_layers=config.layers,
        draft_vocab_size=draft_vocab_size,
        own_lm_head=config.owns_lm_head,
    )


def empty_head(config: HeadConfig, target: Llama, token_ids: Tensor) -> EagleHead:
    """A float32 head with unset trainable weights and the target's embedding and ``lm_head`` rows.

    The embedding is frozen, and so is ``lm_head`` unless the head owns it.
    """
    head = EagleHead(config)
    head.rotary.inv_freq = inverse_frequencies(config.rope, config.head_dim)[0]
    head.embed_tokens.weight = nn.Parameter(target.embed_tokens.weight.detach(), requires_grad=False)
    rows = target.lm_head.weight.detach()[token_ids]
    own = config.own_lm_head
    head.lm_head.weight = nn.Parameter(rows.float() if own else rows, requires_grad=own)
    return head


@torch.no_grad()
def fill_fusion(head: EagleHead, fc: Tensor, target: Llama, scale: float) -> None:
    """Sets a fresh ``fc`` and the final norm of an EAGLE-3 head.

    ``scale`` shrinks that norm to the share of the state that ``fc`` explains, so that the first predictions
    are no surer than they should be.
    """
    head.get_parameter("fc.weight").copy_(fc)
    if head.config.final_norm:
        head.get_parameter("norm.weight").copy_(target.norm.weight.float() * scale)


@torch.no_grad()
def fill_layers(
    head: EagleHead, target: Llama, config: TrainConfig, first: int, residual_rms: float | None
) -> None:
    """Fills the layers from ``first`` on with copies of the target's; ``residual_rms`` None leaves them
    silent."""
    for i in range(first, len(head.layers)):
        source = source_layer(config, len(target.layers), i, len(head.layers))
        _copy_layer(head.layers[i], head, target, source, residual_rms)


def source_layer(config: TrainConfig, count: int, index: int, layers: int) -> int:
    """The target layer that head layer ``index`` copies: the named one, or one of the last."""
    named = config.layer_list("from_layers")
    if named and (len(named) != layers or max(named) >= count):
        raise ConfigError(
            f"from_layers {list(named)}: must name {layers} of the target's layers 0 to {count - 1}"
        )
    return named[index] if named else max(0, count - layers + index)


def _copy_layer(
    layer: nn.Module, head: EagleHead, target: Llama, index: int, residual_rms: float | None
) -> None:
    own = dict(layer.named_parameters())
    gain, rms = _gain(head, target)
    for name, value in target.layers[index].named_parameters():
        source = value.float()
        if name.startswith(("self_attn.o_proj.", "mlp.down_proj.")):
            source = _written(source, gain, residual_rms)
        elif name.endswith("layernorm.weight"):
            source = source / gain * rms
        elif name == "self_attn.qkv_proj.weight" and "input_layernorm.weight" not in own:
            source = source * target.layers[index].get_parameter("input_layernorm.weight").float() / gain
        if own.get(name) is not None and own[name].shape == source.shape:
            own[name].copy_(source)
    if "hidden_norm.weight" in own:
        _fill_eagle3_inputs(own, target, index)


def _fill_eagle3_inputs(own: Mapping[str, Tensor], target: Llama, index: int) -> None:
    """The first EAGLE-3 layer reads the embedding as the target's layer 0 does, the hidden as layer
    ``index``."""
    embedding, hidden = (dict(target.layers[i].named_parameters()) for i in (0, index))
    own["input_layernorm.weight"].copy_(embedding["input_layernorm.weight"])
    own["hidden_norm.weight"].copy_(hidden["input_layernorm.weight"])
    both = (embedding["self_attn.qkv_proj.weight"], hidden["self_attn.qkv_proj.weight"])
    own["self_attn.qkv_proj.weight"].copy_(torch.cat([w.float() for w in both], dim=1))


def _gain(head: EagleHead, target: Llama) -> tuple[Tensor, Tensor]:
    """What the final norm multiplies the head's stream with, kept away from zero, and its rms."""
    gain = target.norm.weight.float()
    if head.config.final_norm:
        gain = torch.ones_like(gain)
    rms = gain.square().mean().sqrt()
    return torch.where(gain < 0, -1.0, 1.0) * gain.abs().clamp(min=_SMALLEST_GAIN * rms), rms


def _written(source: Tensor, gain: Tensor, residual_rms: float | None) -> Tensor:
    """An output projection [h, in] or bias [h] in the head's coordinates; zero when the layer is silent."""
    if residual_rms is None:
        return torch.zeros_like(source)
    return source * (gain.unsqueeze(-1) if source.dim() > 1 else gain) / residual_rms


@torch.no_grad()
def fill_warm(head: EagleHead, start: WarmStart, token_ids: Tensor) -> None:
    """Copies the warm start; rows of an own ``lm_head`` are matched by target id, new ids keep the
    target's."""
    old = dict(start.head.named_parameters())
    for name, parameter in head.named_parameters():
        if name in old and parameter.requires_grad and name != "lm_head.weight":
            parameter.copy_(old[name])
    if head.config.own_embedding:
        head.embed_tokens.weight = nn.Parameter(start.head.embed_tokens.weight.detach(), requires_grad=False)
    if head.config.own_lm_head:
        known, weight = start.token_ids.to(token_ids.device), start.head.lm_head.weight.to(token_ids.device)
        shared = torch.isin(token_ids, known)
        head.lm_head.weight[shared] = weight[torch.searchsorted(known, token_ids[shared])].float()
