"""Every head format: what is read from it, and that the tensors come back under canonical names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from speccompile.checkpoint.config import HeadConfig, RopeConfig
from speccompile.checkpoint.heads import Head, HeadOverrides, open_head
from speccompile.errors import CheckpointError
from tests.checkpoint import head_builders as build
from tests.checkpoint.head_builders import DRAFT, TARGET, VOCAB, Config, H, Tensors

Writer = Callable[..., Path]
EAGLE3: list[Writer] = [build.safeailab3, build.specforge, build.speculators, build.modelopt]
EAGLE1: list[Writer] = [build.safeailab1, build.reduced_eagle1, build.old_speculators]


def read(writer: Writer, folder: Path, edit: build.Edit | None = None, **overrides: object) -> Head:
    return open_head(writer(folder, edit), TARGET, overrides=HeadOverrides(**overrides))  # type: ignore[arg-type]


def config_of(
    writer: Writer, folder: Path, edit: build.Edit | None = None, **overrides: object
) -> HeadConfig:
    return read(writer, folder, edit, **overrides).config


@pytest.mark.parametrize(
    ("writer", "name"),
    [
        (build.safeailab1, "SafeAILab EAGLE-1/2"),
        (build.reduced_eagle1, "SafeAILab EAGLE-1/2"),
        (build.old_speculators, "speculators EAGLE-1"),
        (build.safeailab3, "SafeAILab/SpecForge EAGLE-3"),
        (build.small_eagle3, "SafeAILab/SpecForge EAGLE-3"),
        (build.specforge, "SafeAILab/SpecForge EAGLE-3"),
        (build.speculators, "speculators EAGLE-3"),
        (build.modelopt, "ModelOpt EAGLE-3"),
    ],
)
def test_format_is_recognised_and_readable(tmp_path: Path, writer: Writer, name: str) -> None:
    head = read(writer, tmp_path)
    assert head.format_name == name
    head.check_values()
    stored = load_file(tmp_path / "model.safetensors")
    assert {n: head.tensor(n).shape for n in head.names()}.keys() == set(head.names())
    assert len(head.names()) == len(stored.keys() - {"t2d"})


@pytest.mark.parametrize("writer", EAGLE3)
def test_eagle3_layer_keeps_its_tensors(tmp_path: Path, writer: Writer) -> None:
    head = read(writer, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    prefix = "midlayer" if "midlayer.hidden_norm.weight" in stored else "layers.0"
    for part in (
        "hidden_norm",
        "input_layernorm",
        "post_attention_layernorm",
        "self_attn.q_proj",
        "mlp.up_proj",
    ):
        assert torch.equal(head.tensor(f"layers.0.{part}.weight"), stored[f"{prefix}.{part}.weight"])
    assert torch.equal(head.tensor("fc.weight"), stored["fc.weight"])
    assert head.tensor("layers.0.self_attn.q_proj.weight").shape == (build.HEADS * build.DIM, 2 * H)
    assert (head.config.kind, head.config.draft_vocab_size, head.config.vocab_size) == (
        "eagle3",
        DRAFT,
        VOCAB,
    )
    assert head.config.final_norm
    assert head.config.own_lm_head
    assert head.config.feature_size == 3 * H


@pytest.mark.parametrize("writer", EAGLE1)
def test_eagle1_has_no_input_norm(tmp_path: Path, writer: Writer) -> None:
    head = read(writer, tmp_path)
    assert head.config.kind == "eagle1"
    assert head.config.aux_layers == ()
    assert not head.config.final_norm
    assert not head.config.own_lm_head
    assert "layers.0.input_layernorm.weight" not in head.names()
    with pytest.raises(KeyError):
        head.tensor("layers.0.input_layernorm.weight")


def with_layer_norms(config: dict, tensors: dict) -> None:
    config["layer_norms"] = True
    tensors["layers.0.input_layernorm.weight"] = torch.full((H,), 2.0)
    tensors["norm.weight"] = torch.full((H,), 3.0)


def test_eagle1_with_layer_norms_says_so(tmp_path: Path) -> None:
    head = open_head(build.safeailab1(tmp_path, with_layer_norms), TARGET)
    config = head.config
    assert (config.kind, config.first_input_norm, config.final_norm, config.norm_feedback) == (
        "eagle1", True, True, True,
    )  # fmt: skip
    assert head.tensor("layers.0.input_layernorm.weight")[0] == 2
    assert head.tensor("norm.weight")[0] == 3


@pytest.mark.parametrize("missing", ["norm.weight", "layers.0.input_layernorm.weight"])
def test_announced_layer_norm_is_missing(tmp_path: Path, missing: str) -> None:
    def edit(config: dict, tensors: dict) -> None:
        with_layer_norms(config, tensors)
        del tensors[missing]

    with pytest.raises(CheckpointError, match=rf"'{missing}' is missing"):
        open_head(build.safeailab1(tmp_path, edit), TARGET)


def test_old_speculators_names(tmp_path: Path) -> None:
    head = read(build.old_speculators, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert torch.equal(head.tensor("fc.weight"), stored["fusion_fc.weight"])
    assert torch.equal(head.tensor("fc.bias"), stored["fusion_fc.bias"])
    assert torch.equal(
        head.tensor("layers.0.mlp.down_proj.weight"), stored["transformer.mlp.down_proj.weight"]
    )


@pytest.mark.parametrize("bias_key", [None, True, False])
@pytest.mark.parametrize("stored", [False, True])
def test_fc_bias_is_decided_by_the_tensor(tmp_path: Path, stored: bool, bias_key: bool | None) -> None:
    """Probes L01 and L03: the key ``bias`` says nothing, and fc and attention are independent."""

    def edit(config: Config, tensors: Tensors) -> None:
        if bias_key is not None:
            config["bias"] = bias_key
        if stored:
            tensors["fc.bias"] = torch.ones(H)

    config = config_of(build.safeailab1, tmp_path, edit)
    assert config.fc_bias is stored
    assert not config.attention_bias


def test_attention_and_mlp_bias_are_decided_by_tensors(tmp_path: Path) -> None:
    def edit(_: Config, tensors: Tensors) -> None:
        for name in [n for n in tensors if "_proj." in n]:
            tensors[name.replace(".weight", ".bias")] = torch.zeros(tensors[name].shape[0])

    config = config_of(build.safeailab1, tmp_path, edit)
    assert config.attention_bias
    assert config.mlp_bias
    assert not config.fc_bias


def test_incomplete_biases_are_refused(tmp_path: Path) -> None:
    def edit(_: Config, tensors: Tensors) -> None:
        tensors["layers.0.self_attn.q_proj.bias"] = torch.zeros(build.HEADS * build.DIM)

    with pytest.raises(CheckpointError, match=r"'layers\.0\.self_attn\.k_proj\.bias' is missing"):
        read(build.safeailab1, tmp_path, edit)


def test_own_smaller_head_keeps_its_embedding(tmp_path: Path) -> None:
    """Probe L05."""
    head = read(build.small_eagle3, tmp_path)
    assert head.tensor("fc.weight").shape == (32, 3 * H)
    assert head.config.own_embedding
    assert (head.config.hidden_size, head.config.target_hidden_size) == (32, H)
    assert head.tensor("embed_tokens.weight").shape == (VOCAB, 32)


def test_target_hidden_size_follows_from_fc(tmp_path: Path) -> None:
    config = config_of(build.small_eagle3, tmp_path, lambda config, _: config.pop("target_hidden_size"))
    assert config.target_hidden_size == H


@pytest.mark.parametrize("part", ["embed_tokens.weight", "lm_head.weight"])
def test_small_head_needs_its_own_parts(tmp_path: Path, part: str) -> None:
    with pytest.raises(CheckpointError, match=rf"{part}.*hidden_size 32 differs from target_hidden_size 64"):
        read(build.small_eagle3, tmp_path, lambda _, tensors: tensors.pop(part))


@pytest.mark.parametrize("writer", EAGLE3)
def test_lm_head_is_shared_only_over_the_full_vocabulary(tmp_path: Path, writer: Writer) -> None:
    def edit(config: Config, tensors: Tensors) -> None:
        del config["draft_vocab_size"], tensors["lm_head.weight"], tensors["d2t"]
        tensors.pop("t2d", None)

    assert not config_of(writer, tmp_path / "full", edit).own_lm_head
    with pytest.raises(CheckpointError, match=r"'lm_head\.weight' is missing"):
        read(writer, tmp_path / "reduced", lambda _, tensors: tensors.pop("lm_head.weight"))


@pytest.mark.parametrize("export", ["hf", "sglang"])
def test_specforge_exports(tmp_path: Path, export: str) -> None:
    head = open_head(build.specforge(tmp_path, export=export), TARGET)
    assert head.config.own_embedding is (export == "hf")
    assert head.config.rope == RopeConfig(theta=20000.0)
    assert head.tensor("fc.weight").dtype == torch.bfloat16


def test_specforge_fc_norm_and_norm_output(tmp_path: Path) -> None:
    def edit(config: Config, tensors: Tensors) -> None:
        config.update(fc_norm=True, norm_output=False)
        for i in range(3):
            tensors[f"fc_norm.{i}.weight"] = torch.full((H,), float(i))

    head = read(build.specforge, tmp_path, edit)
    assert head.config.fc_norm
    assert not head.config.final_norm
    assert not head.config.norm_feedback
    assert head.tensor("fc_norm.2.weight")[0] == 2


@pytest.mark.parametrize(
    ("writer", "key"), [(build.specforge, "fc_norm"), (build.speculators, "norm_before_fc")]
)
def test_claimed_norm_must_be_stored(tmp_path: Path, writer: Writer, key: str) -> None:
    with pytest.raises(CheckpointError, match=rf"norm.* is missing \('{key}' is not false\)"):
        read(writer, tmp_path, lambda config, _: config.update({key: True}))


def test_fc_norm_needs_one_norm_per_aux_layer(tmp_path: Path) -> None:
    def edit(_: Config, tensors: Tensors) -> None:
        tensors["fc_norm.0.weight"] = torch.ones(H)

    with pytest.raises(CheckpointError, match=r"'fc_norm\.1\.weight' is missing"):
        read(build.specforge, tmp_path, edit)


def test_speculators_norms(tmp_path: Path) -> None:
    def edit(config: Config, tensors: Tensors) -> None:
        config.update(norm_before_fc=True, norm_output=True)
        tensors["input_norm.weight"] = torch.ones(3 * H)

    config = config_of(build.speculators, tmp_path, edit)
    assert config.fc_input_norm
    assert config.norm_feedback
    assert config.final_norm


def test_speculators_defaults(tmp_path: Path) -> None:
    """Probe L15: null ids, no d2t, theta at the top of the layer block."""

    def edit(config: Config, tensors: Tensors) -> None:
        del tensors["d2t"], tensors["t2d"]
        tensors["lm_head.weight"] = torch.ones(VOCAB, H)
        config["draft_vocab_size"] = VOCAB

    head = read(build.speculators, tmp_path, edit)
    assert head.config.aux_layers == (2, 4, 5)
    assert head.config.rope == RopeConfig(theta=30000.0)
    assert head.config.draft_vocab_size == VOCAB
    assert "d2t" not in head.names()


def test_speculators_rope_parameters(tmp_path: Path) -> None:
    def edit(config: Config, _: Tensors) -> None:
        block = config["transformer_layer_config"]
        del block["rope_theta"]
        block["rope_parameters"] = {"rope_theta": 40000.0, "rope_type": "default"}

    assert config_of(build.speculators, tmp_path, edit).rope == RopeConfig(theta=40000.0)


def test_missing_norm_before_residual_asks_the_user(tmp_path: Path) -> None:
    def edit(config: Config, _: Tensors) -> None:
        del config["norm_before_residual"]

    with pytest.raises(CheckpointError, match=r"config\.json: no 'norm_before_residual'.*override"):
        read(build.speculators, tmp_path, edit)
    for value in (True, False):
        config = config_of(build.speculators, tmp_path, edit, norm_before_residual=value)
        assert config.norm_before_residual is value


@pytest.mark.parametrize(
    ("writer", "value"),
    [
        (build.safeailab3, False),
        (build.specforge, False),
        (build.modelopt, False),
        (build.speculators, True),
    ],
)
def test_residual_flavour(tmp_path: Path, writer: Writer, value: bool) -> None:
    assert config_of(writer, tmp_path).norm_before_residual is value
    assert config_of(writer, tmp_path, norm_before_residual=not value).norm_before_residual is not value


def test_numbered_layers_without_container_ask_for_the_flavour(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="norm_before_residual"):
        read(build.modelopt, tmp_path, lambda config, _: config.pop("eagle_config"))


def test_modelopt_without_aux_states(tmp_path: Path) -> None:
    def edit(config: Config, tensors: Tensors) -> None:
        config["eagle_config"].update(use_aux_hidden_state=False, eagle_aux_hidden_state_layer_ids=[-1])
        del tensors["fc.weight"]

    config = config_of(build.modelopt, tmp_path, edit)
    assert not config.has_fc
    assert config.aux_layers == ()
    assert config.feature_size == H
    with pytest.raises(CheckpointError, match="takes no aux layers"):
        read(build.modelopt, tmp_path, edit, aux_layers=(1, 2, 3))


def test_modelopt_fc_must_agree_with_its_flag(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"'fc\.weight' is missing \('use_aux_hidden_state' is not false"
    ):
        read(build.modelopt, tmp_path, lambda _, tensors: tensors.pop("fc.weight"))

    def unset(config: Config, _: Tensors) -> None:
        config["eagle_config"]["use_aux_hidden_state"] = False

    with pytest.raises(CheckpointError, match=r"'fc\.weight' contradicts .*'use_aux_hidden_state' is false"):
        read(build.modelopt, tmp_path, unset)


def test_modelopt_without_last_norm(tmp_path: Path) -> None:
    def edit(config: Config, tensors: Tensors) -> None:
        config["eagle_config"]["use_last_layernorm"] = False
        del tensors["norm.weight"]

    assert not config_of(build.modelopt, tmp_path, edit).final_norm


def test_modelopt_null_quantisation_is_none(tmp_path: Path) -> None:
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": null}}')
    config_of(build.modelopt, tmp_path)


def test_modelopt_yarn_is_honoured(tmp_path: Path) -> None:
    rope = config_of(build.modelopt, tmp_path).rope
    assert (rope.kind, rope.factor, rope.original_max_position_embeddings) == ("yarn", 32.0, 2048)


@pytest.mark.parametrize("later_norm", ["input_layernorm", "hidden_norm"])
@pytest.mark.parametrize("writer", [build.modelopt, build.speculators])
def test_several_layers(tmp_path: Path, writer: Writer, later_norm: str) -> None:
    def edit(config: Config, tensors: Tensors) -> None:
        config.get("transformer_layer_config", config)["num_hidden_layers"] = 2
        tensors.update(build.random_tensors(build.layer("layers.1")))
        tensors[f"layers.1.{later_norm}.weight"] = torch.full((H,), 7.0)

    head = read(writer, tmp_path, edit)
    assert head.config.num_hidden_layers == 2
    assert head.tensor("layers.1.input_layernorm.weight")[0] == 7
    assert head.tensor("layers.1.self_attn.q_proj.weight").shape[1] == H


def test_several_eagle1_layers(tmp_path: Path) -> None:
    def edit(config: Config, tensors: Tensors) -> None:
        config["num_hidden_layers"] = 2
        tensors.update(build.random_tensors(build.layer("layers.1")))
        tensors["layers.1.input_layernorm.weight"] = torch.ones(H)

    assert config_of(build.safeailab1, tmp_path, edit).num_hidden_layers == 2


@pytest.mark.parametrize("stated", [1, 3])
def test_layer_count_must_agree(tmp_path: Path, stated: int) -> None:
    def edit(config: Config, tensors: Tensors) -> None:
        config["num_hidden_layers"] = stated
        tensors.update(build.random_tensors(build.layer("layers.1")))

    with pytest.raises(CheckpointError, match=rf"num_hidden_layers is {stated}.*holds layers \[0, 1\]"):
        read(build.safeailab1, tmp_path, edit)


def test_llama4_draft_reads_its_mlp_width(tmp_path: Path) -> None:
    def edit(config: Config, _: Tensors) -> None:
        config.update(model_type="llama4_text", intermediate_size=8, intermediate_size_mlp=build.MLP)

    assert config_of(build.modelopt, tmp_path, edit).intermediate_size == build.MLP
    with pytest.raises(CheckpointError, match="has 96 rows, but intermediate_size is 8"):
        read(build.modelopt, tmp_path, lambda config, _: config.update(intermediate_size=8))


def test_explicit_head_dim(tmp_path: Path) -> None:
    """head_dim * heads differs from the hidden size."""

    def edit(config: Config, tensors: Tensors) -> None:
        config["head_dim"] = 8
        for n in ("q", "k", "v"):
            name = f"midlayer.self_attn.{n}_proj.weight"
            tensors[name] = tensors[name][: tensors[name].shape[0] // 2]
        tensors["midlayer.self_attn.o_proj.weight"] = tensors["midlayer.self_attn.o_proj.weight"][:, :32]

    assert config_of(build.safeailab3, tmp_path, edit).head_dim == 8


@pytest.mark.parametrize("writer", [build.safeailab3, build.speculators, build.modelopt, build.specforge])
@pytest.mark.parametrize(
    "name",
    [
        "LlamaForCausalLM",
        "LlamaForCausalLMEagle3",
        "Eagle3LlamaForCausalLM",
        "EAGLE3LlamaForCausalLM",
        "Eagle3Speculator",
        "Eagle3DraftModel",
    ],
)
def test_architecture_names_are_alike(tmp_path: Path, writer: Writer, name: str) -> None:
    """Probe L19."""
    plain = config_of(writer, tmp_path / "a")
    assert config_of(writer, tmp_path / "b", lambda config, _: config.update(architectures=[name])) == plain


def test_draft_rope_defaults_to_10000(tmp_path: Path) -> None:
    assert config_of(build.safeailab3, tmp_path).rope == RopeConfig(theta=10000.0)
    assert TARGET.rope.theta != 10000.0


@pytest.mark.parametrize("kind_key", ["type", "rope_type"])
@pytest.mark.parametrize(
    ("scaling", "kind"),
    [
        ({"factor": 4.0}, "linear"),
        (
            {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 4096,
            },
            "llama3",
        ),
    ],
)
def test_draft_rope_scaling(tmp_path: Path, scaling: Config, kind: str, kind_key: str) -> None:
    def edit(config: Config, _: Tensors) -> None:
        config["rope_scaling"] = scaling | {kind_key: kind}

    rope = config_of(build.safeailab3, tmp_path, edit).rope
    assert (rope.kind, rope.factor) == (kind, scaling["factor"])


def test_weight_file_beside_its_config(tmp_path: Path) -> None:
    build.safeailab1(tmp_path)
    head = open_head(tmp_path / "model.safetensors", TARGET)
    assert head.digest_files() == [tmp_path / "config.json", tmp_path / "model.safetensors"]


def test_bin_head(tmp_path: Path) -> None:
    build.safeailab1(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    head = open_head(tmp_path, TARGET)
    assert torch.equal(head.tensor("fc.weight"), tensors["fc.weight"])
