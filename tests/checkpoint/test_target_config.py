"""Hugging Face configs of transformers 4 and 5, and the models that are refused by name."""

import json

import pytest
import torch
from transformers import LlamaConfig as HfLlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from speccompile.checkpoint.config import RopeConfig
from speccompile.checkpoint.hf_config import llama_config, read_llama_config, read_rope
from speccompile.checkpoint.hf_export import hf_config_json
from speccompile.errors import CheckpointError
from tests.checkpoint.builders import SIZES

RAW = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, **SIZES}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA3_ROPE = RopeConfig(theta=5e5, kind="llama3", factor=8.0)


def parse(**changes):
    return llama_config({**RAW, **changes}, {}, "config.json")


@pytest.mark.parametrize(
    "raw",
    [
        {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 500000.0, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3}},
        {"rope_parameters": {"full_attention": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3}}},
        {
            "rope_theta": 500000.0,
            "rope_scaling": {"rope_type": "llama3", **LLAMA3},
            "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3},
        },
    ],
)
def test_llama3_rope_in_every_spelling(raw):
    assert read_rope(raw, "config.json") == LLAMA3_ROPE


@pytest.mark.parametrize(
    ("raw", "rope"),
    [
        ({}, RopeConfig()),
        ({"rope_theta": 500000.0, "rope_scaling": None}, RopeConfig(theta=500000.0)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, RopeConfig(theta=7.0)),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, RopeConfig(kind="linear", factor=2.0)),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
            RopeConfig(kind="yarn", factor=4.0, original_max_position_embeddings=64),
        ),
        (
            {"max_position_embeddings": 32, "rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": 16}},
            RopeConfig(kind="yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=16.0),
        ),
    ],
)
def test_other_ropes(raw, rope):
    assert read_rope(raw, "config.json") == rope


def test_yarn_mscale_becomes_transformers_attention_factor():
    block = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 8.0,
        "mscale": 0.7,
        "mscale_all_dim": 0.3,
        "original_max_position_embeddings": 64,
    }
    hf = HfLlamaConfig(**{**SIZES, "rope_parameters": dict(block)})
    _, expected = ROPE_INIT_FUNCTIONS["yarn"](hf, torch.device("cpu"))
    assert read_rope({"rope_parameters": block}, "c").attention_factor == pytest.approx(expected)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "factor": None}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "8"}}, "factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "truncate": False}}, "truncate"),
        ({"rope_scaling": [1]}, "must be an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_theta": 1.0, "a": {"rope_theta": 2.0}}}, "mixes"),
        ({"rope_parameters": {"a": {"rope_theta": 1.0}, "b": {"rope_theta": 2.0}}}, "disagree"),
        (
            {"rope_parameters": {"rope_theta": 1.0}, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "disagree",
        ),
    ],
)
def test_rope_that_is_refused(raw, message):
    with pytest.raises(CheckpointError, match=f"my.json.*{message}"):
        read_rope(raw, "my.json")


def test_defaults_are_those_of_transformers():
    required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    raw = {k: SIZES[k] for k in required}
    config, hf = llama_config(raw, {}, "config.json"), HfLlamaConfig(**raw)
    for name in ("num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings"):
        assert getattr(config, name) == getattr(hf, name)
    for name in ("tie_word_embeddings", "attention_bias", "mlp_bias"):
        assert getattr(config, name) is getattr(hf, name) is False
    assert config.rope == RopeConfig(theta=hf.rope_parameters["rope_theta"])


def test_eos_is_the_union_of_generation_config_and_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**RAW, "bos_token_id": 1, "eos_token_id": 5}))
    assert read_llama_config(tmp_path).eos_token_ids == (5,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [6, 5, 7]}))
    config = read_llama_config(tmp_path)
    assert config.eos_token_ids == (6, 5, 7)
    assert config.bos_token_id == 1
    assert parse(eos_token_id=[9, 8]).eos_token_ids == (9, 8)
    assert parse(eos_token_id=None).eos_token_ids == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MistralForCausalLM"], "model_type": "mistral"}, "MistralForCausalLM"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4"}, "not supported yet"),
        ({"model_type": "llama4_text", "architectures": None}, "not supported yet"),
        ({"model_type": "qwen2"}, "qwen2"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"quantization_config": {"bits": 4}}, "unknown"),
        ({"vocab_size": None}, "vocab_size"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": 33}, "head_dim"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": -1}, "head_dim"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps"),
        ({"max_position_embeddings": None}, "max_position_embeddings"),
        ({"eos_token_id": 320}, "eos_token_id 320"),
        ({"eos_token_id": [1, "x"]}, "eos_token_id 'x'"),
    ],
)
def test_configs_that_are_refused(changes, message):
    with pytest.raises(CheckpointError, match=rf"config\.json.*{message}"):
        parse(**changes)


@pytest.mark.parametrize("content", ["", "[1]", "{"])
def test_unreadable_config(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_llama_config(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"head_dim": 16, "attention_bias": True, "mlp_bias": True, "eos_token_id": [3, 4]},
        {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}, "eos_token_id": 3},
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "tie_word_embeddings": True},
        {
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "attention_factor": 1.5,
                "original_max_position_embeddings": 8,
            }
        },
    ],
)
def test_exported_config_reads_back(changes):
    config = parse(**changes)
    exported = hf_config_json(config, torch.bfloat16)
    assert llama_config(exported, {}, "config.json") == config
    hf = HfLlamaConfig(**exported)
    assert hf.rope_parameters["rope_type"] == config.rope.kind
    assert hf.rope_parameters["rope_theta"] == config.rope.theta
