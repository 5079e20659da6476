"""What belongs to later issues is refused by name and never ignored.

Llama 4 (T07), grammars (V13), logit bias (S05), tensor parallelism (B07), quantisation (Q03).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from speccompile.build.config import make_config
from speccompile.checkpoint.target import open_target
from speccompile.cli.main import cli
from speccompile.errors import CheckpointError, ConfigError
from speccompile.runtime.params import SamplingParams
from tests.checkpoint.builders import edit_json, write_llama

BUILD_KEYS = ["quant", "kv_dtype", "tp", "tensor_parallel_size", "draft_tp", "method"]


@pytest.mark.parametrize(
    "keys",
    [
        {"model_type": "llama4", "architectures": ["Llama4ForConditionalGeneration"]},
        {"model_type": "llama4_text", "architectures": ["Llama4ForCausalLM"]},
        {"model_type": "llama4_text", "architectures": None},
    ],
    ids=lambda keys: keys["model_type"],
)
def test_llama4_targets(tmp_path: Path, keys: dict) -> None:
    write_llama(tmp_path)
    edit_json(tmp_path / "config.json", **keys)
    with pytest.raises(CheckpointError, match=r"config\.json: .*Llama 4\) is not supported yet"):
        open_target(tmp_path)


def test_quantised_targets(tmp_path: Path) -> None:
    write_llama(tmp_path)
    edit_json(tmp_path / "config.json", quantization_config={"quant_method": "modelopt", "quant_algo": "FP8"})
    with pytest.raises(CheckpointError, match=r"config\.json: quantization_config .*'modelopt'"):
        open_target(tmp_path)


@pytest.mark.parametrize("key", BUILD_KEYS)
def test_build_keys_and_flags(tmp_path: Path, key: str) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model: a\noutput: b\n{key}: 2\n")
    with pytest.raises(ConfigError, match=rf"recipe\.yaml: unknown key '{key}'"):
        make_config(recipe=recipe)
    flag = "--" + key.replace("_", "-")
    result = CliRunner().invoke(cli, ["build", "--model", "a", "--output", "b", flag, "2"])
    assert result.exit_code == 2
    assert f"No such option '{flag}'" in result.output or f"No such option: {flag}" in result.output


@pytest.mark.parametrize("dtype", ["fp8", "int8", "int4", "nvfp4"])
def test_quantised_engine_dtypes(dtype: str) -> None:
    with pytest.raises(ConfigError, match=f"flags: dtype: expected .*'{dtype}'"):
        make_config(flags={"model": "a", "output": "b", "dtype": dtype})


@pytest.mark.parametrize(
    "field", ["logit_bias", "grammar", "json_schema", "regex", "repetition_penalty", "n"]
)
def test_request_fields(field: str) -> None:
    with pytest.raises(TypeError, match=field):
        SamplingParams(**{field: None})
    flag = "--" + field.replace("_", "-")
    result = CliRunner().invoke(cli, ["run", "engine", "-p", "x", flag, "1"])
    assert result.exit_code == 2
    assert "No such option" in result.output
