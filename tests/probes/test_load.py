"""Files to logits: probes L01 (fc bias), L17 (llama3 rope) and Q07 (values that a dtype cannot hold)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from speccompile.checkpoint.heads import open_head
from speccompile.checkpoint.target import EMBEDDING, LM_HEAD, Target, open_target
from speccompile.errors import CheckpointError
from speccompile.model.load import load_head, load_llama
from tests.checkpoint import head_builders as build
from tests.checkpoint.builders import edit_json, write_llama
from tests.checkpoint.head_builders import HEADS, KV, VOCAB, Config, H, Tensors
from tests.model.dense import dense_causal_attend

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def reference_logits(file: Path, target: Target, token: Tensor, feature: Tensor) -> Tensor:
    """Draft logits of texts of one pair, straight from the stored tensors: a row attends to itself only."""
    w = load_file(file)
    layer = {name.removeprefix("layers.0."): value for name, value in w.items()}
    attention = [layer[f"self_attn.{n}_proj.weight"] for n in ("q", "k", "v")]
    gates = [layer[f"mlp.{n}_proj.weight"] for n in ("gate", "up")]
    pair = torch.cat((target.tensor(EMBEDDING)[token], feature), -1)
    x = F.linear(pair, w["fc.weight"], w.get("fc.bias"))
    value = F.linear(x, torch.cat(attention))[:, -attention[2].shape[0] :]
    heads = value.view(len(x), KV, -1).repeat_interleave(HEADS // KV, 1).flatten(1)
    x = x + F.linear(heads, layer["self_attn.o_proj.weight"])
    gate, up = F.linear(norm(x, layer["post_attention_layernorm.weight"]), torch.cat(gates)).chunk(2, -1)
    x = x + F.linear(F.silu(gate) * up, layer["mlp.down_proj.weight"])
    return F.linear(x, target.tensor(LM_HEAD))


@torch.no_grad()
def draft_logits(folder: Path, target: Target, token: Tensor, feature: Tensor) -> Tensor:
    head = open_head(folder, target.config)
    llama = load_llama(target.config, target.tensor, torch.float32)
    graph = load_head(head.config, head.tensor, llama, torch.float32)

    def attend(_layer: int, _q: Tensor, _k: Tensor, v: Tensor) -> Tensor:
        return v.repeat_interleave(HEADS // KV, dim=1)

    return graph.lm_head(graph(token, graph.fuse(feature), torch.zeros_like(token), attend)[1])


@pytest.mark.parametrize(
    ("keys", "bias"),
    [({}, None), ({"bias": False}, None), ({}, 0.0), ({}, 0.7)],
    ids=["no bias, no key", "no bias, key false", "zero bias, no key", "bias, no key"],
)
def test_fc_bias_is_what_is_stored_and_nothing_else(tmp_path: Path, keys: Config, bias: float | None) -> None:
    """L01: draft logits are bit-equal to a forward over the stored tensors; a bias is never made up."""

    def edit(config: Config, tensors: Tensors) -> None:
        config.update(keys)
        for name in tensors:
            tensors[name] *= 0.1
        if bias is not None:
            tensors["fc.bias"] = torch.linspace(-bias, bias, H)

    target = build.target(tmp_path / "target")
    folder = build.safeailab1(tmp_path / "head", edit)
    token, feature = torch.tensor([0, 5, VOCAB - 1]), torch.randn(3, H)
    logits = draft_logits(folder, target, token, feature)
    expected = reference_logits(folder / "model.safetensors", target, token, feature)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_llama3_rope_from_the_file_to_the_logits(tmp_path: Path, key: str) -> None:
    """L17: tokens at positions 0, 10 and 9000 (and after them) of one text, against transformers."""
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3}
    model = write_llama(tmp_path, hidden_size=H, rope_parameters=rope, max_position_embeddings=16384)
    scaling = {key: "llama3", **LLAMA3}
    edit_json(tmp_path / "config.json", rope_parameters=None, rope_theta=500000.0, rope_scaling=scaling)
    target = open_target(tmp_path)
    llama = load_llama(target.config, target.tensor, torch.float32)
    position = torch.cat([torch.arange(start, start + 4) for start in (0, 10, 9000)])
    token = torch.randint(0, 320, position.shape)
    with torch.no_grad():
        # With a mask, because transformers takes gaps in positions without one for several texts.
        mask = torch.ones(1, len(token), dtype=torch.int64)
        expected = model(token[None], attention_mask=mask, position_ids=position[None]).logits[0]
        logits = llama.lm_head(llama(token, position, dense_causal_attend)[0])
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("value", [1e5, -7e4])
def test_values_beyond_the_engines_dtype_are_named(tmp_path: Path, value: float) -> None:
    """Q07: bf16 holds 1e5, fp16 would make it infinite; bf16 and fp32 engines take it as it is."""
    model = write_llama(tmp_path / "target", dtype=torch.bfloat16, hidden_size=H, vocab_size=VOCAB)
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = value
    model.save_pretrained(tmp_path / "target")

    def edit(_: Config, tensors: Tensors) -> None:
        tensors["fc.weight"][0, 0] = value

    target = open_target(tmp_path / "target")
    head = open_head(build.safeailab1(tmp_path / "head", edit), target.config)
    stored = target.tensor("model.layers.1.mlp.up_proj.weight")
    assert stored.dtype == torch.bfloat16
    assert stored[3, 5] == torch.tensor(value).bfloat16()
    for checked in (target, head):
        checked.check_values(torch.bfloat16)
        checked.check_values(torch.float32)
        with pytest.raises(CheckpointError, match=r"(up_proj|fc)\.weight' has 1 value.* float16.*--dtype"):
            checked.check_values(torch.float16)
