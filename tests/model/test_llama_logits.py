"""Our target graph against transformers, on tiny random models of each Llama kind (float32)."""

import pytest
import torch
from transformers import LlamaConfig as HfConfig
from transformers import LlamaForCausalLM

from speccompile.checkpoint.config import LlamaConfig, RopeConfig
from speccompile.model.load import load_llama
from tests.model.dense import dense_causal_attend

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
KINDS = {
    "llama2": ({}, RopeConfig()),
    "tied": ({"tie_word_embeddings": True}, RopeConfig()),
    "gqa": ({"num_key_value_heads": 2}, RopeConfig()),
    "head_dim": ({"head_dim": 32}, RopeConfig()),
    "biases": ({"attention_bias": True, "mlp_bias": True}, RopeConfig()),
    "llama3": (
        {"rope_parameters": LLAMA3},
        RopeConfig(theta=5e5, kind="llama3", factor=8.0, original_max_position_embeddings=64),
    ),
    "linear": (
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
        RopeConfig(kind="linear", factor=4.0),
    ),
    "yarn": (
        {"rope_parameters": YARN},
        RopeConfig(kind="yarn", factor=4.0, original_max_position_embeddings=64),
    ),
}


def tiny_pair(kind: str) -> tuple[LlamaForCausalLM, LlamaConfig]:
    extra, rope = KINDS[kind]
    base = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
    }
    hf = HfConfig(**{**base, **extra})
    torch.manual_seed(0)
    model = LlamaForCausalLM(hf).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "norm.weight")):
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    ours = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=hf.num_key_value_heads,
        head_dim=hf.head_dim,
        rms_norm_eps=1e-5,
        rope=rope,
        max_position_embeddings=16384,
        tie_word_embeddings=hf.tie_word_embeddings,
        attention_bias=hf.attention_bias,
        mlp_bias=hf.mlp_bias,
    )
    return model, ours


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("start", [0, 10, 9000])
def test_logits_equal_transformers(kind, start):
    hf_model, config = tiny_pair(kind)
    state = hf_model.state_dict()
    ours = load_llama(config, lambda name: state[name], torch.float32)
    token = torch.randint(0, 128, (40,))
    position = torch.arange(start, start + 40)
    with torch.no_grad():
        expected = hf_model(token[None], position_ids=position[None]).logits[0]
        hidden, feature = ours(token, position, dense_causal_attend)
        actual = ours.lm_head(hidden)
    assert torch.equal(hidden, feature)
    scale = expected.abs().max()
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4 * float(scale))


def test_aux_features_are_layer_inputs():
    hf_model, config = tiny_pair("gqa")
    state = hf_model.state_dict()
    ours = load_llama(config, lambda name: state[name], torch.float32)
    token = torch.randint(0, 128, (12,))
    with torch.no_grad():
        states = hf_model(token[None], output_hidden_states=True).hidden_states
        _, feature = ours(token, torch.arange(12), dense_causal_attend, (0, 2))
    expected = torch.cat((states[0][0], states[2][0]), dim=-1)
    torch.testing.assert_close(feature, expected, rtol=1e-4, atol=1e-5)
