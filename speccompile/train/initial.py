"""The head a training run starts from: the best linear predictor of the next feature.

``fc`` is the least-squares map from (embedding, feature) to the next feature, which alone finds the target's
next token in a quarter to a third of the cases.  The residual branches start silent (``o_proj`` and
``down_proj`` are zero) and shaped like the target's last layers; live copies of them diverged in our trials.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from speccompile.checkpoint.config import HeadConfig
from speccompile.errors import ConfigError
from speccompile.model.eagle import EagleHead
from speccompile.model.llama import Llama
from speccompile.model.rotary import inverse_frequencies

_RIDGE = 1e-4
_SMALLEST_GAIN = 0.05


def head_config(target: Llama, layers: int, draft_vocab_size: int) -> HeadConfig:
    """An EAGLE-1 head with the target's own sizes and rope, sharing its embedding and ``lm_head`` rows."""
    c = target.config
    if not 1 <= layers <= c.num_hidden_layers:
        raise ConfigError(f"layers {layers}: a head has 1 to {c.num_hidden_layers} layers for this target")
    return HeadConfig(
        kind="eagle1",
        num_hidden_layers=layers,
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
        attention_bias=c.attention_bias,
        mlp_bias=c.mlp_bias,
        final_norm=False,
    )


def fit_fusion(embed: Tensor, sequences: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """``fc`` [h, 2h]: ridge regression of feature i+1 on (embedding of token i+1, feature i).

    ``sequences`` yields ids i64 [n + 1] and features [n, h].
    """
    h = embed.shape[1]
    gram, cross = torch.zeros(2 * h, 2 * h, dtype=torch.float64), torch.zeros(2 * h, h, dtype=torch.float64)
    for ids, feature in sequences:
        wide = feature.float()
        pair = torch.cat((embed[ids[1 : len(wide)]].float(), wide[:-1]), dim=1)
        gram += (pair.T @ pair).double()
        cross += (pair.T @ wide[1:]).double()
    gram += torch.diag(gram.diag() * _RIDGE + gram.diag().mean() * _RIDGE * 0.01)
    return torch.linalg.solve(gram, cross).T.float().contiguous()


def initial_head(config: HeadConfig, target: Llama, token_ids: Tensor, fc: Tensor) -> EagleHead:
    """A trainable float32 head; the target's embedding and its ``lm_head`` rows ``token_ids`` are frozen."""
    head = EagleHead(config)
    head.rotary.inv_freq = inverse_frequencies(config.rope, config.head_dim)[0]
    first = len(target.layers) - config.num_hidden_layers
    with torch.no_grad():
        for i, layer in enumerate(head.layers):
            _copy_layer(dict(layer.named_parameters()), target, first + i)
        head.get_parameter("fc.weight").copy_(fc)
    head.embed_tokens.weight = nn.Parameter(target.embed_tokens.weight.detach(), requires_grad=False)
    head.lm_head.weight = nn.Parameter(target.lm_head.weight.detach()[token_ids], requires_grad=False)
    return head


def _copy_layer(layer: dict[str, Tensor], target: Llama, index: int) -> None:
    """Fills ``layer`` from a target layer, adapted to inputs that carry the target's final norm's gain."""
    gain = target.norm.weight.float()
    rms = gain.square().mean().sqrt()
    gain = torch.where(gain < 0, -1.0, 1.0) * gain.abs().clamp(min=_SMALLEST_GAIN * rms)
    for name, value in target.layers[index].named_parameters():
        source = value.float()
        if name.startswith(("self_attn.o_proj.", "mlp.down_proj.")):
            source = torch.zeros_like(source)
        elif name.endswith("layernorm.weight"):
            source = source / gain * rms
        elif name == "self_attn.qkv_proj.weight" and "input_layernorm.weight" not in layer:
            source = source * target.layers[index].get_parameter("input_layernorm.weight").float() / gain
        if name in layer:
            layer[name].copy_(source)
