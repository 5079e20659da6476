"""Opening Hugging Face targets: tensors equal transformers' state dict, and every mismatch is named."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from speccompile.checkpoint.hf_export import export_hf
from speccompile.checkpoint.target import open_target
from speccompile.errors import CheckpointError
from tests.checkpoint.builders import edit_json, write_llama, write_tokenizer

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"head_dim": 16},
        {"num_key_value_heads": 1, "shard": "20KB"},
        {
            "dtype": torch.float16,
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 99.0},
        },
    ],
)
def test_tensors_equal_transformers(tmp_path, overrides):
    model = write_llama(tmp_path, **overrides)
    target = open_target(tmp_path)
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        del state[HEAD]
    assert sorted(target.expected_shapes) == sorted(state)
    for name, value in state.items():
        assert torch.equal(target.tensor(name), value)
    assert target.tensor("model.norm.weight", torch.bfloat16).dtype == torch.bfloat16
    for field in ("vocab_size", "head_dim", "num_key_value_heads", "attention_bias", "tie_word_embeddings"):
        assert getattr(target.config, field) == getattr(model.config, field)
    assert target.config.rope.theta == model.config.rope_parameters["rope_theta"]
    assert target.config.rope.kind == model.config.rope_parameters["rope_type"]
    target.check_values()


def edit_tensors(folder, **changes):
    """Sets tensors of a single-file checkpoint; a value of None removes the tensor."""
    path = folder / "model.safetensors"
    state = {**load_file(path), **{k.replace("__", "."): v for k, v in changes.items()}}
    save_file({k: v.contiguous() for k, v in state.items() if v is not None}, path)


def test_stored_head_of_a_tied_config_is_compared_with_the_embedding(tmp_path):
    model = write_llama(tmp_path, tie_word_embeddings=True)
    embedding = model.state_dict()[EMBEDDING].clone()
    edit_tensors(tmp_path, lm_head__weight=embedding)
    target = open_target(tmp_path)
    assert target.config.tie_word_embeddings
    with pytest.raises(CheckpointError, match="lm_head"):
        target.tensor(HEAD)
    edit_tensors(tmp_path, lm_head__weight=embedding + 1)
    target = open_target(tmp_path)
    assert not target.config.tie_word_embeddings
    assert torch.equal(target.tensor(HEAD), embedding + 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model__layers__1__mlp__up_proj__weight": None},
            r"'model\.layers\.1\.mlp\.up_proj\.weight' is missing",
        ),
        ({"lm_head__weight": None}, "'lm_head.weight' is missing.*tie_word_embeddings"),
        ({"model__layers__2__mlp__up_proj__weight": torch.zeros(1)}, "unexpected tensor 'model.layers.2"),
        ({"model__layers__0__self_attn__q_proj__bias": torch.zeros(32)}, "unexpected tensor.*q_proj.bias"),
        ({"model__norm__weight": torch.zeros(31)}, r"'model\.norm\.weight' has shape \[31\].*\[32\]"),
        ({"model__norm__weight": torch.zeros(32, dtype=torch.int32)}, "'model.norm.weight' has dtype int32"),
        ({"model__norm__weight": torch.zeros(32, dtype=torch.float8_e4m3fn)}, "dtype float8_e4m3fn"),
    ],
)
def test_mismatch_names_file_and_tensor(tmp_path, changes, message):
    write_llama(tmp_path)
    edit_tensors(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: .*{message}"):
        open_target(tmp_path)


def test_old_rotary_buffers_are_ignored(tmp_path):
    write_llama(tmp_path)
    edit_tensors(tmp_path, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4))
    open_target(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite(tmp_path, value):
    model = write_llama(tmp_path, dtype=torch.bfloat16)
    weight = model.state_dict()["model.layers.1.mlp.down_proj.weight"].clone()
    weight[3, 5] = value
    edit_tensors(tmp_path, model__layers__1__mlp__down_proj__weight=weight)
    target = open_target(tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .*layers\.1\.mlp\.down_proj.* 1 NaN"):
        target.check_values()


def test_folders_that_are_no_target(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json nor a \.gguf"):
        open_target(tmp_path)
    with pytest.raises(CheckpointError, match=r"config\.json nor a \.gguf"):
        open_target(tmp_path / "missing.gguf")


def test_missing_tokenizer_is_reported_when_asked_for(tmp_path):
    write_llama(tmp_path)
    target = open_target(tmp_path)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json.*save_pretrained"):
        target.tokenizer  # noqa: B018
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json.*not readable"):
        target.tokenizer  # noqa: B018


def test_tokenizer_files_are_written(tmp_path):
    write_llama(tmp_path / "in", eos_token_id=3)
    edit_json(tmp_path / "in" / "generation_config.json", eos_token_id=[1, 3], bos_token_id=0)
    write_tokenizer(tmp_path / "in")
    (tmp_path / "out").mkdir()
    target = open_target(tmp_path / "in")
    target.tokenizer.write(tmp_path / "out")
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_text() == (tmp_path / "in" / name).read_text()
    written = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert written["bos_token"] == "<s>"
    assert written["chat_template"] == (tmp_path / "in" / "chat_template.jinja").read_text()
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 0, "eos_token_id": [1, 3]}


def test_digest_files_cover_everything_that_is_read(tmp_path):
    write_llama(tmp_path, shard="20KB")
    write_tokenizer(tmp_path)
    assert {f.name for f in open_target(tmp_path).digest_files()} == {f.name for f in tmp_path.iterdir()}


@pytest.mark.parametrize("tied", [False, True])
def test_exported_folder_loads_in_transformers(tmp_path, tied):
    model = write_llama(tmp_path / "in", tie_word_embeddings=tied, attention_bias=True, head_dim=16)
    write_tokenizer(tmp_path / "in")
    export_hf(open_target(tmp_path / "in"), tmp_path / "out", torch.float32)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.tensor([[5, 6, 7, 300]])
    assert torch.equal(again(ids).logits, model(ids).logits)
    export_hf(open_target(tmp_path / "in"), tmp_path / "out", torch.bfloat16)
    assert open_target(tmp_path / "out").source.dtype(EMBEDDING) == torch.bfloat16


def test_a_template_that_is_not_utf8_is_named(tmp_path):
    write_llama(tmp_path)
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes("{{ 'é' }}".encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: not readable as UTF-8 text"):
        open_target(tmp_path).tokenizer  # noqa: B018


def test_json_nested_beyond_reason_is_named(tmp_path):
    write_llama(tmp_path)
    (tmp_path / "config.json").write_text('{"a":' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(CheckpointError, match=r"config\.json: not readable as JSON"):
        open_target(tmp_path)
