"""Refusals: other kinds of drafts by name, damaged and inconsistent files by file and tensor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from speccompile.checkpoint.heads import HeadOverrides, open_head
from speccompile.errors import CheckpointError
from tests.checkpoint import head_builders as build
from tests.checkpoint.head_builders import TARGET, Config, H, Tensors


def add(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> build.Edit:
    def edit(_: Config, tensors: Tensors) -> None:
        tensors[name] = torch.ones(*(shape or (H,))).to(dtype)

    return edit


@pytest.mark.parametrize(
    ("writer", "tensor", "kind"),
    [
        (build.safeailab3, "midlayer.self_attn.kv_a_proj_with_mqa.weight", "MLA"),
        (build.modelopt, "parallel_draft_heads.0.medusa_layers.0.linear.weight", "Medusa"),
        (build.speculators, "mask_hidden", "P-EAGLE"),
        (build.specforge, "markov_w1.weight", "DSpark"),
        (build.modelopt, "eh_proj.weight", "MTP"),
        (build.safeailab1, "embed_layernorm.weight", "HASS"),
        (build.safeailab1, "hidden_states_layernorm.weight", "HASS"),
        (build.old_speculators, "embedding_layernorm.weight", "HASS"),
        (build.old_speculators, "pre_lm_head_layernorm.weight", "HASS"),
        (build.speculators, "layers.0.self_attn.q_norm.weight", "Qwen3"),
        (build.safeailab1, "layers.0.mlp.experts.0.up_proj.weight", "mixture-of-experts"),
        (build.modelopt, "layers.0.mlp.up_proj.weight_scale", "quantised"),
        (build.safeailab1, "model.layers.0.mlp.up_proj.weight", "full model"),
    ],
)
def test_other_drafts_are_named_by_their_tensors(tmp_path: Path, writer, tensor: str, kind: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: an? {kind}|\({kind}\)|{kind}.*{tensor}"):
        open_head(writer(tmp_path, add(tensor)), TARGET)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_quantised_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    with pytest.raises(CheckpointError, match=rf"quantised head \(tensor 'fc\.weight' is {dtype}"):
        open_head(build.safeailab3(tmp_path, add("fc.weight", H, 3 * H, dtype=dtype)), TARGET)


@pytest.mark.parametrize(
    ("keys", "kind"),
    [
        ({"architectures": ["PEagleDraftModel"]}, "P-EAGLE"),
        ({"architectures": ["P-EAGLE"]}, "P-EAGLE"),
        ({"architectures": ["DFlashDraftModel"]}, "DFlash"),
        ({"architectures": ["DominoDraftModel"]}, "Domino"),
        ({"architectures": ["DSparkDraftModel"]}, "DSpark"),
        ({"architectures": ["DeepSeekMTPModel"]}, "MTP"),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "MLA"),
        ({"architectures": ["MistralLarge3EagleForCausalLM"]}, "MLA"),
        ({"architectures": ["MedusaModel"]}, "Medusa"),
        ({"speculators_model_type": "peagle"}, "P-EAGLE"),
        ({"speculators_model_type": "dflash"}, "DFlash"),
        ({"speculators_model_type": "dspark"}, "DSpark"),
        ({"speculators_model_type": "mtp"}, "MTP"),
        ({"dflash_config": {"mask_token_id": 1}}, "DFlash"),
        ({"medusa_num_heads": 4}, "Medusa"),
        ({"kv_lora_rank": 512}, "MLA"),
        ({"truncated_vocab_size": 128}, "old vLLM conversion"),
        ({"layernorms": True}, "HASS"),
        ({"eagle_config": {"parallel_draft_step": 4}}, "Medusa"),
        ({"eagle_config": {"use_mtp_layernorm": True}}, "MTP"),
        ({"eagle_config": {"eh_proj_before_attn": True}}, "eh_proj_before_attn"),
        ({"eagle_config": {"next_layer_regular": False}}, "re-read the embedding"),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}, "quantised"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
    ],
)
def test_other_drafts_are_named_by_their_config(tmp_path: Path, keys: Config, kind: str) -> None:
    folder = build.safeailab3(tmp_path, lambda config, _: config.update(keys))
    with pytest.raises(CheckpointError, match=rf"config\.json: .*{kind}.* is not supported"):
        open_head(folder, TARGET)


def test_quantised_by_its_second_config(tmp_path: Path) -> None:
    build.modelopt(tmp_path)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json: a quantised head"):
        open_head(tmp_path, TARGET)


def test_null_quantization_config_is_fine(tmp_path: Path) -> None:
    def edit(config: Config, _: Tensors) -> None:
        config["quantization_config"] = {"quant_algo": None, "quant_method": "modelopt"}

    open_head(build.modelopt(tmp_path, edit), TARGET)


def test_training_state_is_no_head(tmp_path: Path) -> None:
    (tmp_path / "training_state.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match="SpecForge training checkpoint"):
        open_head(tmp_path, TARGET)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"layer_types": ["sliding_attention"]}, "sliding-window"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ({"num_attention_heads": None}, "num_attention_heads is missing"),
        ({"num_attention_heads": "4"}, "num_attention_heads must be a positive integer"),
        ({"num_key_value_heads": 3}, "3 does not divide num_attention_heads 4"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"vocab_size": 64}, "draft vocabulary of 128 entries for a vocabulary of 64"),
        ({"hidden_size": 32}, "has 64 rows, but hidden_size is 32"),
        ({"head_dim": 32}, r"shape \[64, 128\], the config asks for \[128, 128\]"),
    ],
)
def test_inconsistent_configs(tmp_path: Path, keys: Config, message: str) -> None:
    folder = build.safeailab3(tmp_path, lambda config, _: config.update(keys))
    with pytest.raises(CheckpointError, match=message):
        open_head(folder, TARGET)


ALL_FORMATS = [
    build.safeailab1,
    build.reduced_eagle1,
    build.safeailab3,
    build.small_eagle3,
    build.specforge,
    build.speculators,
    build.old_speculators,
    build.modelopt,
]
OPTIONAL = {"fusion_fc.bias", "t2d", "d2t", "embed_tokens.weight", "lm_head.weight"}


@pytest.mark.parametrize("writer", ALL_FORMATS)
def test_every_missing_tensor_is_named(tmp_path: Path, writer) -> None:  # type: ignore[no-untyped-def]
    names: list[str] = []
    writer(tmp_path, lambda _, tensors: names.extend(tensors))
    for name in set(names) - OPTIONAL:
        canonical = name.replace("midlayer.", "layers.0.").replace("transformer.", "layers.0.")
        canonical = canonical.replace("fusion_fc.", "fc.")
        folder = writer(tmp_path, lambda _, tensors, name=name: tensors.pop(name))
        with pytest.raises(CheckpointError) as error:
            open_head(folder, TARGET)
        assert "model.safetensors: tensor" in str(error.value)
        assert repr(canonical) in str(error.value)


@pytest.mark.parametrize("writer", ALL_FORMATS)
def test_every_wrong_shape_is_named(tmp_path: Path, writer) -> None:  # type: ignore[no-untyped-def]
    names: list[str] = []
    writer(tmp_path, lambda _, tensors: names.extend(tensors))
    for name in names:

        def grow(_: Config, tensors: Tensors, name: str = name) -> None:
            tensors[name] = torch.cat([tensors[name], tensors[name][:1]])

        with pytest.raises(CheckpointError) as error:
            open_head(writer(tmp_path, grow), TARGET)
        assert "model.safetensors" in str(error.value)


@pytest.mark.parametrize("writer", ALL_FORMATS)
def test_surplus_tensor_is_named(tmp_path: Path, writer) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor 'extra\.weight' is unexpected"):
        open_head(writer(tmp_path, add("extra.weight")), TARGET)


def test_eagle1_with_input_norm_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'layers\.0\.input_layernorm\.weight' is unexpected"):
        open_head(build.safeailab1(tmp_path, add("layers.0.input_layernorm.weight")), TARGET)


@pytest.mark.parametrize("name", ["fc_norm.0.weight", "input_norm.weight", "layers.0.hidden_norm.weight"])
def test_eagle1_has_no_eagle3_norms(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match=rf"{name}' is unexpected"):
        open_head(build.safeailab1(tmp_path, add(name)), TARGET)


@pytest.mark.parametrize("overrides", [{"norm_before_residual": True}, {"aux_layers": (1, 2, 3)}])
def test_eagle1_takes_no_overrides(tmp_path: Path, overrides: Config) -> None:
    with pytest.raises(CheckpointError, match=r"override given, but"):
        open_head(build.safeailab1(tmp_path), TARGET, overrides=HeadOverrides(**overrides))


def test_two_names_for_one_tensor(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="have the same meaning"):
        open_head(build.safeailab3(tmp_path, add("layers.0.hidden_norm.weight")), TARGET)


def test_wrong_dtype(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'norm\.weight' has dtype float64"):
        open_head(build.safeailab3(tmp_path, add("norm.weight", H, dtype=torch.float64)), TARGET)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_values_are_checked(tmp_path: Path, bad: float) -> None:
    def edit(_: Config, tensors: Tensors) -> None:
        tensors["midlayer.mlp.up_proj.weight"][3, 5] = bad

    head = open_head(build.safeailab3(tmp_path, edit), TARGET)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor 'midlayer\.mlp\.up_proj\.weight'"):
        head.check_values()


def test_scalar_tensor(tmp_path: Path) -> None:
    def edit(_: Config, tensors: Tensors) -> None:
        tensors["midlayer.mlp.gate_proj.weight"] = torch.tensor(1.0)

    with pytest.raises(CheckpointError, match="is a scalar"):
        open_head(build.safeailab3(tmp_path, edit), TARGET)


def test_truncated_file(tmp_path: Path) -> None:
    path = build.safeailab3(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated"):
        open_head(tmp_path, TARGET)


def test_missing_config(tmp_path: Path) -> None:
    (build.safeailab1(tmp_path) / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: file not found"):
        open_head(tmp_path, TARGET)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda config, _: config.update(model_type="llama4_text"), "Llama 4 layers"),
        (
            lambda config, _: config.update(target_hidden_size=128),
            "target_hidden_size 128, but this head reads",
        ),
        (add("layers.0.self_attn.q_proj.weight", 64, 48), r"shape \[64, 48\]; the first layer of a head"),
    ],
)
def test_eagle1_refusals(tmp_path: Path, edit: build.Edit, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_head(build.safeailab1(tmp_path, edit), TARGET)


def test_speculators_kind_must_agree_with_tensors(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="'speculators_model_type' is 'eagle', but the tensors"):
        open_head(
            build.speculators(tmp_path, lambda config, _: config.update(speculators_model_type="eagle")),
            TARGET,
        )


def test_speculators_needs_its_layer_block(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no 'transformer_layer_config'"):
        open_head(
            build.speculators(tmp_path, lambda config, _: config.pop("transformer_layer_config")),
            TARGET,
        )
