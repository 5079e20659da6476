"""Engines of the ``torch`` backend, compiled for real: same ids with any tree, batch and dtype."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from speccompile.build.builder import build
from speccompile.build.config import make_config
from speccompile.build.progress import Progress
from speccompile.runtime.engine import Engine
from speccompile.runtime.params import SamplingParams
from speccompile.runtime.session import Session
from tests.engine.agreeing_pair import write_agreeing_pair
from tests.runtime.fakes import finish
from tests.runtime.test_dispatch import shuffled

TREES = ("chain-3", "[[0],[1],[2],[3],[4],[5],[6],[7],[0,0],[0,1],[1,0],[0,0,0]]", "deep-15")
PROMPTS = ([5, 6, 7], list(range(20, 37)), list(range(100, 140)), [9])


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Path, Path]:
    return write_agreeing_pair(tmp_path_factory.mktemp("agreeing"))


def build_engine(pair: tuple[Path, Path], output: Path, **flags: object) -> Path:
    sizes = {"max_batch_size": 4, "max_seq_len": 128, "max_rows": 128, "block_size": 16}
    given = {"model": str(pair[0]), "draft": str(pair[1]), "output": str(output), **sizes, **flags}
    build(make_config(flags=given), Progress(lambda _line: None))
    return output


@pytest.fixture(scope="module", params=["fp32", "bf16", "int8"])
def compiled(request, pair, tmp_path_factory) -> Engine:
    flags = {"dtype": request.param} if request.param != "int8" else {"dtype": "bf16", "quantization": "int8"}
    return Engine.load(build_engine(pair, tmp_path_factory.mktemp(request.param) / "e", **flags))


def params(speculation: str, temperature: float, **more: object) -> SamplingParams:
    return SamplingParams(
        max_tokens=40, ignore_eos=True, seed=11, temperature=temperature, speculation=speculation, **more
    )


@pytest.mark.parametrize("filters", [{}, {"top_k": 20}, {"top_p": 0.7, "min_p": 0.01}], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0])
def test_speculation_never_changes_the_ids(compiled, temperature, filters):
    plain = [compiled.generate(p, params("off", temperature, **filters)) for p in PROMPTS]
    together = compiled.generate(list(PROMPTS), params("off", temperature, **filters))
    assert [c.token_ids for c in together] == [c.token_ids for c in plain]
    for tree in TREES:
        done = compiled.generate(list(PROMPTS), params(tree, temperature, **filters))
        assert [c.token_ids for c in done] == [c.token_ids for c in plain], tree
        if temperature < 1:
            assert sum(c.rounds for c in done) < 0.9 * sum(c.rounds for c in plain), "nothing was accepted"


@pytest.mark.parametrize("compiled", ["fp32"], indirect=True)
def test_compiled_equals_reference(pair, compiled, tmp_path):
    reference = Engine.load(build_engine(pair, tmp_path / "r", dtype="fp32", backend="reference"))
    for temperature in (0.0, 1.0):
        both = [e.generate(PROMPTS[1], params("default", temperature)) for e in (reference, compiled)]
        assert both[0].token_ids == both[1].token_ids
        assert both[0].rounds == both[1].rounds


def test_loading_imports_no_compiler(compiled):
    code = (
        "import sys; from speccompile.runtime.engine import Engine\n"
        "from speccompile.runtime.params import SamplingParams\n"
        f"Engine.load({str(compiled.path)!r}).generate([5], SamplingParams(max_tokens=4))\n"
        "sys.exit('torch._inductor.codecache' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_trees_that_change_every_round_never_change_the_ids(compiled, temperature):
    """Requests of several lengths join and leave while the dispatcher picks any tree or none."""
    plain = [compiled.generate(p, params("off", temperature)).token_ids for p in PROMPTS]
    session = Session(
        compiled.programs,
        compiled.kv,
        vocab_size=compiled.manifest.target.vocab_size,
        eos_ids=(),
        token_bytes=compiled.tokenizer.token_bytes,
        default_tree=shuffled(1),
        prefill_chunk=7,
    )
    requests = []
    for prompt in PROMPTS:
        requests.append(session.submit(prompt, params("auto", temperature)))
        for _ in range(5):
            session.step()
    finish(session)
    assert [request.completion().token_ids for request in requests] == plain
