"""GGUF targets: tensors of every supported type, row order of q and k, config keys, refusals."""

import sys

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig as HfLlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from speccompile.checkpoint.config import RopeConfig
from speccompile.checkpoint.hf_export import export_hf
from speccompile.checkpoint.target import open_target
from speccompile.errors import CheckpointError
from tests.checkpoint.builders import SIZES, random_llama, write_llama
from tests.checkpoint.gguf_builders import gguf_name, gguf_state, permute, plain, write_gguf

Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
@pytest.mark.parametrize(
    "overrides",
    [{}, {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True, "head_dim": 16}],
)
def test_plain_tensors_equal_transformers(tmp_path, kind, overrides):
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
    model = random_llama(**overrides)
    write_gguf(tmp_path / "t.gguf", model, plain(kind))
    write_llama(tmp_path / "hf", **overrides)
    target, folder = open_target(tmp_path / "t.gguf"), open_target(tmp_path / "hf")
    assert target.expected_shapes == folder.expected_shapes
    assert target.config.tie_word_embeddings == folder.config.tie_word_embeddings
    for name in target.expected_shapes:
        value = model.state_dict()[name]
        expected = value.to(dtype) if value.ndim == 2 else value
        assert target.source.dtype(name) == expected.dtype
        assert torch.equal(target.tensor(name), expected)
    target.check_values()


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_quantized_tensors_are_dequantized_and_reordered(tmp_path, kind):
    model = random_llama(intermediate_size=64)
    write_gguf(tmp_path / "t.gguf", model, plain(kind))
    target = open_target(tmp_path / "t.gguf")
    heads = {"q_proj": 4, "k_proj": 2}
    for name in target.expected_shapes:
        value = gguf_state(model)[gguf_name(name)]
        quant = gguf.GGMLQuantizationType[kind if value.ndim == 2 else "F32"]
        stored = gguf.dequantize(gguf.quantize(value, quant), quant)
        ours = target.tensor(name)
        assert ours.dtype == torch.float32
        part = name.split(".")[-2]
        back = permute(ours.numpy(), heads[part]) if part in heads else ours.numpy()
        assert np.array_equal(back, stored)
        assert np.abs(ours.numpy() - model.state_dict()[name].numpy()).max() < 0.25


def random_blocks(value, kind):
    """Random bytes as K-quant blocks, with the float16 scales made harmless."""
    quant = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[quant]
    rows, columns = value.shape
    data = np.random.default_rng(0).integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    scale = np.array([0.01], np.float16).view(np.uint8)
    for offset in {"Q4_K": (0, 2), "Q6_K": (208,)}[kind]:
        data[..., offset : offset + 2] = scale
    return data.reshape(rows, -1), quant


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_k_quants_equal_gguf_dequantize(tmp_path, kind):
    model = random_llama(hidden_size=256, intermediate_size=256, num_hidden_layers=1)

    def encode(name, value):
        return random_blocks(value, kind) if value.ndim == 2 else plain("F32")(name, value)

    write_gguf(tmp_path / "t.gguf", model, encode)
    target = open_target(tmp_path / "t.gguf")
    for name, heads in (("mlp.up_proj", None), ("self_attn.q_proj", 4), ("self_attn.k_proj", 2)):
        ours = target.tensor(f"model.layers.0.{name}.weight").numpy()
        expected = gguf.dequantize(*random_blocks(ours, kind))
        assert np.array_equal(permute(ours, heads) if heads else ours, expected)


def test_config_and_digests(tmp_path):
    model = random_llama(
        head_dim=16, rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 5e5}
    )
    path = tmp_path / "t.gguf"
    write_gguf(path, model, tokenizer__ggml__eot_token_id=3)
    target = open_target(path)
    config = target.config
    for name in SIZES:
        assert getattr(config, name) == SIZES[name]
    assert (config.head_dim, config.rms_norm_eps, config.rope) == (16, 1e-5, RopeConfig(theta=5e5))
    assert (config.bos_token_id, config.eos_token_ids) == (0, (1, 3))
    assert target.digest_files() == [path]


@pytest.mark.parametrize(
    ("keys", "rope"),
    [
        ({"llama__rope__freq_base": None}, RopeConfig()),
        (
            {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 2.0},
            RopeConfig(kind="linear", factor=2.0),
        ),
        (
            {
                "llama__rope__scaling__type": "yarn",
                "llama__rope__scaling__factor": 2.0,
                "llama__rope__scaling__original_context_length": 64,
            },
            RopeConfig(kind="yarn", factor=2.0, original_max_position_embeddings=64),
        ),
    ],
)
def test_rope_keys(tmp_path, keys, rope):
    write_gguf(tmp_path / "t.gguf", random_llama(), **keys)
    assert open_target(tmp_path / "t.gguf").config.rope == rope


def llama3_divisors(factor, original, head_dim):
    def frequencies(block):
        hf = HfLlamaConfig(**{**SIZES, "head_dim": head_dim, "rope_parameters": {"rope_theta": 5e5, **block}})
        return ROPE_INIT_FUNCTIONS["llama3"](hf, torch.device("cpu"))[0].numpy()

    scaled = frequencies(
        {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": original,
        }
    )
    plain_frequencies = 5e5 ** (-np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)
    return (plain_frequencies / scaled).astype(np.float32)


def write_llama3(path, original, **keys):
    model = random_llama(head_dim=64, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    divisors = llama3_divisors(32.0, original, 64)
    write_gguf(path, model, extra_tensors={"rope_freqs.weight": divisors}, **keys)


def test_rope_factors_become_llama3_scaling(tmp_path):
    write_llama3(tmp_path / "t.gguf", 8192)
    rope = open_target(tmp_path / "t.gguf").config.rope
    assert rope.factor == pytest.approx(32.0)
    assert (rope.kind, rope.theta, rope.low_freq_factor, rope.high_freq_factor) == ("llama3", 5e5, 1.0, 4.0)
    assert rope.original_max_position_embeddings == 8192


def test_other_rope_factors_are_refused(tmp_path):
    write_llama3(tmp_path / "t.gguf", 4096)
    with pytest.raises(CheckpointError, match=r"t\.gguf: tensor 'rope_freqs.weight' is not the llama3"):
        open_target(tmp_path / "t.gguf")
    write_llama3(tmp_path / "t.gguf", 8192, llama__rope__scaling__type="linear")
    with pytest.raises(CheckpointError, match="together with rope scaling 'linear'"):
        open_target(tmp_path / "t.gguf")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"architecture": "qwen2"}, "'qwen2'"),
        ({"architecture": "llama4"}, "not supported yet"),
        ({"llama__expert_count": 8}, "mixture-of-experts"),
        ({"split__count": 2}, "split model"),
        ({"llama__block_count": None}, "'llama.block_count' is missing"),
        ({"llama__block_count": 3}, r"'model\.layers\.2\.input_layernorm\.weight' is missing"),
        ({"llama__block_count": 1}, "unexpected tensor 'model.layers.1"),
        ({"llama__feed_forward_length": 40}, r"gate_proj.weight' has shape \[48, 32\].*\[40, 32\]"),
        ({"llama__feed_forward_length": [48, 40]}, "differs between layers"),
        ({"llama__attention__head_count_kv": [2, 1]}, "head_count_kv"),
        ({"llama__rope__dimension_count": 4}, "dimension_count"),
        ({"llama__rope__scaling__type": "longrope", "llama__rope__scaling__factor": 2.0}, "longrope"),
        ({"llama__rope__scaling__attn_factor": 2.0}, "attn_factor"),
        ({"llama__rope__scale_linear": 2.0}, "scale_linear"),
        ({"tokenizer__ggml__tokens": ["a", "b"]}, r"embed_tokens.weight' has shape \[320, 32\].*\[2, 32\]"),
        (
            {"extra_tensors": {"blk.0.attn_q.scale": np.ones(1, np.float32)}},
            "unexpected tensor 'blk.0.attn_q.scale'",
        ),
    ],
)
def test_refusals(tmp_path, keys, message):
    write_gguf(tmp_path / "t.gguf", random_llama(), **keys)
    with pytest.raises(CheckpointError, match=rf"t\.gguf: .*{message}"):
        open_target(tmp_path / "t.gguf")


def test_other_quantizations_are_refused_by_name(tmp_path):
    write_gguf(tmp_path / "t.gguf", random_llama(intermediate_size=64), plain("Q5_0"))
    with pytest.raises(CheckpointError, match=r"t\.gguf: tensor 'token_embd.weight' has type Q5_0"):
        open_target(tmp_path / "t.gguf")


@pytest.mark.parametrize("keep", [0, 3, 100, 5000, -1])
def test_truncated_file(tmp_path, keep):
    path = tmp_path / "t.gguf"
    write_gguf(path, random_llama())
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"t\.gguf: truncated or not a GGUF"):
        open_target(path)


def test_not_a_number(tmp_path):
    model = random_llama()
    model.get_parameter(Q).data[0, 0] = float("nan")
    write_gguf(tmp_path / "t.gguf", model)
    with pytest.raises(CheckpointError, match=r"t\.gguf: .*layers\.1\.self_attn\.q_proj"):
        open_target(tmp_path / "t.gguf").check_values()


def test_missing_package_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "t.gguf").write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(CheckpointError, match=r"pip install 'speccompile\[gguf\]'"):
        open_target(tmp_path / "t.gguf")


def test_export_equals_the_gguf(tmp_path):
    write_gguf(tmp_path / "t.gguf", random_llama(intermediate_size=64), plain("Q4_1"))
    target = open_target(tmp_path / "t.gguf")
    export_hf(target, tmp_path / "out", torch.bfloat16)
    again = open_target(tmp_path / "out")
    assert again.config == target.config
    for name in target.expected_shapes:
        assert torch.equal(again.tensor(name), target.tensor(name, torch.bfloat16))
