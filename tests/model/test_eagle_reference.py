"""Draft heads against a second, plain implementation written from the papers' equations."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from speccompile.checkpoint.config import HeadConfig, RopeConfig
from speccompile.model.eagle import EagleHead
from tests.model.dense import dense_causal_attend

BASE = HeadConfig(
    kind="eagle1",
    num_hidden_layers=1,
    hidden_size=32,
    target_hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=500.0),
    vocab_size=64,
    draft_vocab_size=64,
    final_norm=False,
)
EAGLE3 = dataclasses.replace(BASE, kind="eagle3", aux_layers=(2, 4, 5), final_norm=True, own_lm_head=True)
HEADS = {
    "eagle1": BASE,
    "eagle1-bias": dataclasses.replace(BASE, fc_bias=True),
    "eagle1-layer-norms": dataclasses.replace(
        BASE, num_hidden_layers=2, first_input_norm=True, final_norm=True, norm_feedback=True
    ),
    "eagle1-two-layers": dataclasses.replace(BASE, num_hidden_layers=2),
    "eagle3": EAGLE3,
    "eagle3-wide-target": dataclasses.replace(EAGLE3, target_hidden_size=40),
    "eagle3-norm-before-residual": dataclasses.replace(EAGLE3, norm_before_residual=True),
    "eagle3-norm-feedback": dataclasses.replace(EAGLE3, norm_feedback=True),
    "eagle3-fc-norm": dataclasses.replace(EAGLE3, fc_norm=True, fc_input_norm=True),
    "eagle3-two-layers": dataclasses.replace(EAGLE3, num_hidden_layers=2),
    "eagle3-no-aux": dataclasses.replace(EAGLE3, aux_layers=(), has_fc=False),
}


def norm(x, weight):
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def rope(x, position):
    """Rotation as multiplication of complex numbers (x_j + i x_{j + D/2})."""
    half = x.shape[-1] // 2
    angle = position[:, None] * 500.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat((turned.real, turned.imag), -1)


def attention(x, w, prefix, position):
    q, k, v = (w[prefix + "qkv_proj.weight"] @ x.T).T.split((32, 16, 16), -1)
    q, k = rope(q.view(-1, 4, 8), position), rope(k.view(-1, 2, 8), position)
    v = v.view(-1, 2, 8)
    out = torch.zeros_like(q)
    for t in range(len(x)):
        for head in range(4):
            weight = (k[: t + 1, head // 2] @ q[t, head] / 8**0.5).softmax(0)
            out[t, head] = weight @ v[: t + 1, head // 2]
    return out.flatten(1) @ w[prefix + "o_proj.weight"].T


def mlp(x, w, prefix):
    gate, up = (x @ w[prefix + "gate_up_proj.weight"].T).split(48, -1)
    return (F.silu(gate) * up) @ w[prefix + "down_proj.weight"].T


def reference(config, w, token, feature, position):
    embedding = w["embed_tokens.weight"][token]
    if config.kind == "eagle1":
        x = torch.cat((embedding, feature), -1) @ w["fc.weight"].T + w.get("fc.bias", 0.0)
        seen = norm(x, w["layers.0.input_layernorm.weight"]) if config.first_input_norm else x
        x = x + attention(seen, w, "layers.0.self_attn.", position)
    else:
        if config.fc_norm:
            parts = feature.split(config.target_hidden_size, -1)
            feature = torch.cat([norm(p, w[f"fc_norm.{i}.weight"]) for i, p in enumerate(parts)], -1)
        if config.fc_input_norm:
            feature = norm(feature, w["input_norm.weight"])
        g = feature @ w["fc.weight"].T if config.has_fc else feature
        normed = norm(g, w["layers.0.hidden_norm.weight"])
        both = torch.cat((norm(embedding, w["layers.0.input_layernorm.weight"]), normed), -1)
        x = (normed if config.norm_before_residual else g) + attention(
            both, w, "layers.0.self_attn.", position
        )
    x = x + mlp(norm(x, w["layers.0.post_attention_layernorm.weight"]), w, "layers.0.mlp.")
    for i in range(1, config.num_hidden_layers):
        p = f"layers.{i}."
        x = x + attention(norm(x, w[p + "input_layernorm.weight"]), w, p + "self_attn.", position)
        x = x + mlp(norm(x, w[p + "post_attention_layernorm.weight"]), w, p + "mlp.")
    final = norm(x, w["norm.weight"]) if config.final_norm else x
    return (final if config.norm_feedback else x), final @ w["lm_head.weight"].T


@pytest.mark.parametrize("kind", HEADS)
def test_draft_logits_equal_plain_reference(kind):
    config = HEADS[kind]
    torch.manual_seed(1)
    head = EagleHead(config).double().eval()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(0, 0.4)
    head.rotary.inv_freq = head.rotary.inv_freq.float()
    token, position = torch.randint(0, 64, (9,)), torch.arange(3, 12)
    feature = torch.randn(9, config.feature_size, dtype=torch.float64)
    with torch.no_grad():
        hidden, scored = head(token, head.fuse(feature), position, dense_causal_attend)
        logits = head.lm_head(scored)
        expected_hidden, expected = reference(config, dict(head.named_parameters()), token, feature, position)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(hidden, expected_hidden, rtol=1e-4, atol=1e-4)
