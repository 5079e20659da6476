"""``--quantization int8``: what is replaced, what is reported, and that speculation still changes nothing."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from speccompile.build.accuracy import quantize_and_compare
from speccompile.build.builder import build
from speccompile.build.config import make_config
from speccompile.build.progress import Progress
from speccompile.checkpoint.heads import open_head
from speccompile.checkpoint.target import open_target
from speccompile.cli.main import cli
from speccompile.errors import ConfigError
from speccompile.model.int8 import Int8Linear, balancing_divisor, measure_inputs, quantize_linears
from speccompile.model.layers import causal_attend
from speccompile.model.load import load_head, load_llama
from speccompile.runtime.engine import Engine
from speccompile.runtime.params import SamplingParams
from speccompile.verify import compare
from tests.engine.agreeing_pair import write_agreeing_pair

TEXTS = [torch.arange(5, 45), torch.arange(100, 117)]
SIZES = {"backend": "reference", "dtype": "fp32", "max_seq_len": 96, "max_batch_size": 2, "threads": 1}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return write_agreeing_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def built(pair, tmp_path_factory):
    """The engine's folder and the build's JSON report."""
    output = tmp_path_factory.mktemp("int8") / "engine"
    flags = [part for name, value in SIZES.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    paths = ["--model", str(pair[0]), "--draft", str(pair[1]), "--output", str(output)]
    command = ["build", *paths, *flags, "--quantization", "int8", "--json"]
    result = CliRunner().invoke(cli, command, catch_exceptions=False)
    assert "top-1 agreement" in result.stderr
    return output, json.loads(result.stdout)


@pytest.fixture(scope="module")
def engine(built):
    return Engine.load(built[0])


def graphs(pair, dtype=torch.float32):
    target = open_target(pair[0])
    head = open_head(pair[1], target.config)
    model = load_llama(target.config, target.tensor, dtype)
    return model, load_head(head.config, head.tensor, model, dtype)


def run(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        hidden, _ = model(ids[None], torch.arange(len(ids))[None], causal_attend)
        return model.lm_head(hidden[0])


def test_every_projection_is_replaced_and_nothing_else(pair):
    target, head = graphs(pair)
    report = quantize_and_compare(target, head, TEXTS, "test")
    kinds = {name.rpartition(".")[2]: type(m) for name, m in target.named_modules() if "proj" in name}
    assert set(kinds) == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    assert set(kinds.values()) == {type(target.lm_head)} == {Int8Linear}
    assert isinstance(head.fc, nn.Linear) and isinstance(head.layers[0].self_attn.qkv_proj, Int8Linear)
    assert report.kept == ("target.embed_tokens.weight", "head.fc.weight", "head.embed_tokens.weight")
    matrices = {p.data_ptr() for p in target.parameters() if p.dim() == 2}
    assert matrices == {target.embed_tokens.weight.data_ptr()}, "an unquantized copy of a matrix is left"


def test_the_report_measures_the_difference(pair):
    target, _ = graphs(pair)
    before = [run(target, ids) for ids in TEXTS]
    report = quantize_and_compare(target, None, TEXTS, "test")
    after = [run(target, ids) for ids in TEXTS]
    old, new = torch.cat(before).log_softmax(-1), torch.cat(after).log_softmax(-1)
    divergence = float((old.exp() * (old - new)).sum(-1).mean())
    assert 0 < report.mean_kl == pytest.approx(divergence, rel=1e-3, abs=1e-7)
    assert report.top1_agreement == int((old.argmax(-1) == new.argmax(-1)).sum()) / 57
    assert report.positions == 57 and "57 positions of test" in report.summary()


def test_balancing_saves_small_inputs_beside_a_large_one():
    linear = nn.Linear(64, 48)
    x = torch.randn(20, 64)
    x[:, 7] *= 300
    with torch.no_grad():
        exact = linear(x)
        largest = measure_inputs(nn.ModuleDict({"o_proj": linear}), lambda: linear(x))["o_proj"]
        assert torch.equal(largest, x.abs().amax(0))
        balanced, plain = (Int8Linear(linear, k)(x) - exact for k in (largest, torch.ones(64)))
    assert balanced.std() < 0.3 * plain.std()
    divisor = balancing_divisor(largest, linear.weight)
    assert divisor.min() == 1 and divisor[7] > 8 and torch.equal(divisor.log2(), divisor.log2().round())


def test_odd_ranges_give_usable_divisors():
    weight = torch.randn(8, 4)
    weight[:, 1] = 0
    divisor = balancing_divisor(torch.tensor([0.0, 1.0, 1e30, 1.0]), weight)
    assert divisor.isfinite().all() and divisor.min() == 1 and divisor.max() <= 2**12


def test_bias_leading_dimensions_and_dtype():
    for dtype in (torch.float32, torch.bfloat16):
        linear = nn.Linear(32, 24).to(dtype)
        x = torch.randn(2, 5, 32).to(dtype)
        with torch.no_grad():
            out = Int8Linear(linear, torch.ones(32))(x)
            wide = Int8Linear(linear, torch.ones(32), torch.float32)(x)
            expected = linear.float()(x.float())
        assert (out.shape, out.dtype, wide.dtype) == (expected.shape, dtype, torch.float32)
        torch.testing.assert_close(wide, expected, rtol=0, atol=0.05)
        assert torch.equal(wide.to(dtype), out)


def test_quantizing_a_head_leaves_the_targets_lm_head(pair):
    target, head = graphs(pair)
    kept = target.lm_head.weight
    quantize_linears(head, measure_inputs(head, lambda: None))
    assert target.lm_head.weight is kept


def test_manifest_report_and_inspect(built, engine):
    output, report = built
    stored = json.loads((output / "manifest.json").read_text())
    assert stored["config"]["quantization"] == report["config"]["quantization"] == "int8"
    assert stored["quantization"] == report["quantization"]
    assert 0 < stored["quantization"]["mean_kl"] < 0.2
    assert 0.5 < stored["quantization"]["top1_agreement"] <= 1
    assert stored["quantization"]["calibration"] == "built-in texts"
    assert engine.manifest.quantization.positions > 100
    shown = CliRunner().invoke(cli, ["inspect", str(output)], catch_exceptions=False).output
    assert "int8 against unquantized" in shown and "head.fc.weight" in shown


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0])
def test_speculation_never_changes_the_ids(engine, temperature):
    params = SamplingParams(max_tokens=24, ignore_eos=True, seed=5, temperature=temperature)
    for prompt in ([5, 6, 7], list(range(20, 37)), [9]):
        comparison, _ = compare(engine, "test", prompt, params)
        assert comparison.difference is None
    if temperature == 0:
        assert comparison.acceptance_length > 1, "nothing was accepted"


def test_the_targets_logits_are_those_of_the_quantized_graph(pair, engine):
    target, head = graphs(pair)
    report = quantize_and_compare(target, head, TEXTS, "test")
    assert report.mean_kl < 0.2
    done = engine.complete(TEXTS[0].tolist(), SamplingParams(max_tokens=1, ignore_eos=True))
    assert done.token_ids == [int(run(target, TEXTS[0])[-1].argmax())]


def test_own_calibration_texts(pair, tmp_path):
    texts = tmp_path / "texts.jsonl"
    rows = [{"text": "the quick brown fox"}, {"messages": [{"role": "user", "content": "hello there"}]}]
    texts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = {"model": str(pair[0]), "output": str(tmp_path / "e"), **SIZES, "quantization": "int8"}
    report = build(make_config(flags={**flags, "calibration": str(texts)}), Progress(lambda _line: None))
    assert report.quantization.calibration == str(texts)
    assert 4 < report.quantization.positions < 80
    assert "top-1 agreement" in report.summary()
    texts.write_text('{"text": "good"}\nbad\n')
    short = tmp_path / "short.jsonl"
    short.write_text('{"text": "a"}\n')
    for broken in (texts, short, tmp_path / "absent.jsonl"):
        with pytest.raises(ConfigError, match=str(broken)):
            build(make_config(flags={**flags, "calibration": str(broken)}), Progress(lambda _line: None))


def test_a_plain_engine_has_no_report(pair, tmp_path):
    flags = {"model": str(pair[0]), "output": str(tmp_path / "e"), **SIZES}
    report = build(make_config(flags=flags), Progress(lambda _line: None))
    assert report.quantization is None and "int8" not in report.summary()
    shown = CliRunner().invoke(cli, ["inspect", str(tmp_path / "e")], catch_exceptions=False).output
    assert "int8" not in shown
