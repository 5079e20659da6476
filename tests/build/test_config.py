"""Build configuration: YAML and flags, strict keys and values, resolution of ``auto``."""

import dataclasses
import json
from pathlib import Path

import pytest

from speccompile.build import isa
from speccompile.build.config import BuildConfig, config_from_manifest, make_config
from speccompile.checkpoint.config import HeadConfig, LlamaConfig, RopeConfig
from speccompile.errors import ConfigError
from speccompile.files import package_data

BASE = {"model": "target", "output": "engine"}


def tiny_target(**changes) -> LlamaConfig:
    fields = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope": RopeConfig(),
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "eos_token_ids": (2,),
    }
    return LlamaConfig(**{**fields, **changes})


def tiny_head(**changes) -> HeadConfig:
    fields = {
        "kind": "eagle3",
        "num_hidden_layers": 1,
        "hidden_size": 64,
        "target_hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope": RopeConfig(),
        "vocab_size": 512,
        "draft_vocab_size": 512,
        "aux_layers": (2, 4, 5),
    }
    return HeadConfig(**{**fields, **changes})


def recipe(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return path


def test_flags_win_over_yaml(tmp_path):
    path = recipe(tmp_path, "model: a\noutput: b\nmax_seq_len: 128\nblock_size: 16\n")
    config = make_config(recipe=path, flags={"max_seq_len": "256", "output": "c"})
    assert (config.model, config.output, config.max_seq_len, config.block_size) == ("a", "c", 256, 16)


FIELDS = [f.name for f in dataclasses.fields(BuildConfig) if f.name != "calibration"]


@pytest.mark.parametrize("key", FIELDS)
def test_every_field_is_a_yaml_key(tmp_path, key):
    values = {
        "model": "m", "output": "o", "draft": "d", "backend": "reference", "dtype": "fp16",
        "max_batch_size": 3, "max_seq_len": 99, "max_rows": 77, "block_size": 8, "tree": "off",
        "max_tree_depth": 5, "draft_topk": 4, "threads": 2, "norm_before_residual": True,
        "aux_layers": [1, 2, 3], "smoke": False, "quantization": "int8",
    }  # fmt: skip
    path = recipe(tmp_path, json.dumps({**BASE, key: values[key]}))
    expected = tuple(values[key]) if key == "aux_layers" else values[key]
    assert getattr(make_config(recipe=path), key) == expected


def test_unknown_key_names_the_closest(tmp_path):
    with pytest.raises(ConfigError, match=r"recipe\.yaml: unknown key 'max_seqlen'.*'max_seq_len'"):
        make_config(recipe=recipe(tmp_path, "max_seqlen: 128\n"))
    with pytest.raises(ConfigError, match="unknown key 'zzz'; known keys: model"):
        make_config(flags={**BASE, "zzz": 1})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dtype", "int4"), ("backend", "tensorrt"), ("max_seq_len", 0), ("max_seq_len", "-3"),
        ("max_batch_size", True), ("max_batch_size", 1.5), ("block_size", "auto"), ("smoke", "yes"),
        ("aux_layers", "2,x"), ("aux_layers", []), ("tree", 3), ("tree", [[0.5]]), ("model", ""),
        ("norm_before_residual", 1), ("quantization", "int4"), ("quantization", "fp8"),
        ("quantization", True), ("calibration", 3),
    ],
)  # fmt: skip
def test_wrong_values_name_the_key(key, value):
    with pytest.raises(ConfigError, match=f"flags: {key}: expected"):
        make_config(flags={**BASE, "draft": "d", key: value})


def test_wrong_files(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        make_config(recipe=tmp_path / "absent.yaml")
    with pytest.raises(ConfigError, match="not valid YAML"):
        make_config(recipe=recipe(tmp_path, "a: [1"))
    with pytest.raises(ConfigError, match="expected 'key: value' lines"):
        make_config(recipe=recipe(tmp_path, "- a\n"))
    with pytest.raises(ConfigError, match="model: missing"):
        make_config(flags={"output": "x"})


def test_contradictions(tmp_path):
    with pytest.raises(ConfigError, match="tree needs draft"):
        make_config(flags={**BASE, "tree": "chain-4"})
    with pytest.raises(ConfigError, match="is the target model itself"):
        make_config(flags={"model": str(tmp_path), "draft": f"{tmp_path}/.", "output": "x"})
    with pytest.raises(ConfigError, match="calibration needs quantization"):
        make_config(flags={**BASE, "calibration": "texts.jsonl"})
    both = "model: a\noutput: b\nquantization: int8\ncalibration: texts.jsonl\n"
    assert make_config(recipe=recipe(tmp_path, both)).calibration == "texts.jsonl"
    assert make_config(recipe=recipe(tmp_path, "model: a\noutput: b\ntree: off\n")).tree == "off"


def test_resolve_leaves_no_auto():
    config = make_config(flags={**BASE, "draft": "d", "threads": 2})
    resolved = config.resolve(tiny_target(), tiny_head())
    values = dataclasses.asdict(resolved)
    assert [k for k, v in values.items() if v == "auto"] == []
    assert resolved.dtype == ("bf16" if isa.has_bf16() else "fp32")
    assert (resolved.max_seq_len, resolved.max_rows) == (2048, 512)
    assert (resolved.max_tree_depth, resolved.draft_topk, resolved.aux_layers) == (8, 8, (2, 4, 5))


def test_resolve_follows_tree_and_model():
    wide = make_config(flags={**BASE, "draft": "d", "tree": [[0] * n for n in range(1, 12)] + [[8]]})
    resolved = wide.resolve(tiny_target(max_position_embeddings=8192), tiny_head())
    assert (resolved.max_seq_len, resolved.max_rows) == (4096, 512)
    assert (resolved.max_tree_depth, resolved.draft_topk) == (11, 9)
    batch = make_config(flags={**BASE, "draft": "d", "max_batch_size": 40, "tree": "chain-19"})
    assert batch.resolve(tiny_target(), tiny_head()).max_rows == 800
    plain = make_config(flags=BASE).resolve(tiny_target(max_position_embeddings=64), None)
    assert (plain.max_seq_len, plain.max_rows, plain.max_tree_depth, plain.draft_topk) == (64, 64, 0, 0)
    assert plain.tree == "off"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"max_seq_len": 4096}, "max_seq_len: 4096 is more than"),
        ({"max_rows": 100, "tree": "deep-15"}, "16 rows .* max_rows allows 12"),
        ({"max_tree_depth": 3, "tree": "deep-15"}, "max_tree_depth allows 3"),
        ({"draft_topk": 2}, "draft_topk allows 2"),
        ({"tree": "no-such-tree"}, "neither a file nor a known name"),
        ({"draft_topk": 513}, "draft_topk: 513 is more than"),
    ],
)
def test_resolve_refuses_impossible_sizes(flags, message):
    config = make_config(flags={**BASE, "draft": "d", **flags})
    with pytest.raises(ConfigError, match=message):
        config.resolve(tiny_target(), tiny_head())


def test_manifest_round_trip():
    config = make_config(flags={**BASE, "draft": "d", "tree": [[0], [1], [0, 0]]})
    resolved = config.resolve(tiny_target(), tiny_head())
    data = json.loads(json.dumps(dataclasses.asdict(resolved)))
    assert config_from_manifest(data) == resolved
    with pytest.raises(TypeError, match="max_rows"):
        config_from_manifest({k: v for k, v in data.items() if k != "max_rows"})


def test_recipes_hold_real_keys():
    recipes = sorted(package_data("build_configs").glob("*.yaml"))
    assert recipes
    for path in recipes:
        make_config(recipe=path, flags={**BASE, "draft": "d"}).draft_tree()
