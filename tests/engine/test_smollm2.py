"""The real small model: SmolLM2-135M-Instruct with the shipped head, the same that ``tools/demo`` runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from speccompile import demo
from speccompile.build.progress import Progress
from speccompile.checkpoint.target import Target, open_target
from speccompile.errors import SpeccompileError
from speccompile.model.load import load_llama
from speccompile.runtime.engine import Engine
from speccompile.runtime.params import SamplingParams
from tests.model.dense import dense_causal_attend

TEXT = "The Moon moves around the Earth in about 27 days, and in 1969 two people walked on it. "


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    try:
        demo.find_weights()
    except SpeccompileError as error:
        pytest.skip(f"{error}; tools/test installs them")
    folder = tmp_path_factory.mktemp("demo")
    demo.prepare(folder, Progress(lambda _line: None))
    return folder


@pytest.fixture(scope="module")
def target(folder) -> Target:
    return open_target(folder / "target")


@pytest.fixture(scope="module")
def engine(folder) -> Engine:
    return Engine.load(folder / "engine")


def test_logits_equal_transformers(folder, target, engine):
    token = torch.tensor(engine.encode(TEXT * 3))
    theirs = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    ours = load_llama(target.config, target.tensor, torch.float32)
    with torch.no_grad():
        expected = theirs(token[None]).logits[0]
        hidden, _ = ours(token, torch.arange(len(token)), dense_causal_attend)
        actual = ours.lm_head(hidden)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_speculation_pays_and_never_changes_the_ids(engine, temperature):
    prompts = [engine.encode(text, chat=True) for text in demo.PROMPTS]
    common = {"max_tokens": 64, "temperature": temperature, "seed": 3}
    plain = [engine.generate(p, SamplingParams(speculation="off", **common)) for p in prompts]
    done = [engine.generate(p, SamplingParams(**common)) for p in prompts]
    together = engine.generate(prompts, SamplingParams(speculation="chain-2", **common))
    assert [c.token_ids for c in done] == [c.token_ids for c in plain]
    assert [c.token_ids for c in together] == [c.token_ids for c in plain]
    rounds, kept = sum(c.rounds for c in done), sum(c.completion_tokens for c in done)
    assert kept / rounds > 1.3
