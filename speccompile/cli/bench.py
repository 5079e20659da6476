"""``speccompile bench``: speed of engines, plain and speculative, and of transformers, in one run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from speccompile.bench.contender import Contender, Job, contender_json
from speccompile.bench.race import Score, race
from speccompile.build.engine_dir import EngineDir, load_engine_dir
from speccompile.checkpoint.tokenizer import Tokenizer
from speccompile.cli.prompts import first_turns, read_prompts
from speccompile.cli.show import echo_json, table
from speccompile.errors import ConfigError
from speccompile.files import size_text

_BASELINES = ("ar", "transformers")


@click.command("bench")
@click.argument("engines", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option(
    "--prompts", type=click.Path(path_type=Path), required=True, help="JSONL file; first turns only."
)
@click.option("--limit", type=click.IntRange(1), default=20, show_default=True, help="Prompts to use.")
@click.option(
    "--max-tokens", type=click.IntRange(1), default=128, show_default=True, help="Tokens per answer."
)
@click.option("--temperature", type=click.FloatRange(0), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--baselines", default="ar", show_default=True, help="Comma list of: ar, transformers.")
@click.option("--model", type=click.Path(path_type=Path), default=None, help="Folder for transformers.")
@click.option("--chat/--no-chat", default=True, show_default=True, help="Use the chat template.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def command(
    engines: tuple[Path, ...],
    prompts: Path,
    limit: int,
    max_tokens: int,
    temperature: float,
    baselines: str,
    model: Path | None,
    chat: bool,
    as_json: bool,
) -> None:
    """Measure ENGINES at batch 1, in turns with the baselines, prompt by prompt."""
    names = _baselines(baselines, model)
    found = [load_engine_dir(path) for path in engines]
    threads = _threads(found)
    contenders = _contenders(found, names, model)
    tokenizer = Tokenizer.from_dir(found[0].tokenizer)
    rows = read_prompts(prompts, chat=chat)[:limit]
    jobs = [
        Job(prompt_ids=ids, max_tokens=max_tokens, temperature=temperature, seed=number)
        for number, ids in enumerate(first_turns(rows, tokenizer))
    ]

    def bar(items: Sequence[Job]) -> Iterable[Job]:
        return tqdm(items, unit="prompt", disable=as_json)

    eos_ids = list(found[0].manifest.target.eos_token_ids)
    scores = race(contenders, jobs, eos_ids=eos_ids, threads=threads, bar=bar)
    if as_json:
        echo_json({"prompts": len(jobs), "threads": threads, "rows": [_row(s, scores) for s in scores]})
    else:
        click.echo(_table(scores))


def _baselines(text: str, model: Path | None) -> list[str]:
    names = [name for name in text.split(",") if name]
    unknown = [name for name in names if name not in _BASELINES]
    if unknown:
        raise ConfigError(f"--baselines: {unknown[0]!r} is not known; choose from {', '.join(_BASELINES)}")
    if "transformers" in names and model is None:
        raise ConfigError("--baselines transformers needs --model, the Hugging Face folder of the target")
    return names


def _threads(engines: list[EngineDir]) -> int:
    """CPU threads that all engines were compiled for; the baselines get as many."""
    found = {engine.manifest.config.threads for engine in engines}
    if len(found) > 1:
        raise ConfigError(f"engines: compiled for {sorted(found)} threads; build them alike to compare them")
    return found.pop()


def _contenders(engines: list[EngineDir], names: list[str], model: Path | None) -> list[Contender]:
    out = []
    for engine in engines:
        config = engine.manifest.config
        label = f"{engine.path.name} ({config.backend}, {config.dtype})"
        common: dict[str, Any] = {"path": engine.path, "dtype": config.dtype, "kind": "engine"}
        if "ar" in names or engine.manifest.head is None:
            out.append(Contender(name=f"{label} AR", **common))
        if engine.manifest.head is not None:
            out.append(Contender(name=f"{label} speculative", speculation="auto", **common))
    if "transformers" in names and model is not None:
        for dtype in dict.fromkeys(engine.manifest.config.dtype for engine in engines):
            out.append(
                Contender(name=f"transformers eager {dtype}", kind="transformers", path=model, dtype=dtype)
            )
    return out


def _partner(score: Score, scores: list[Score], **wanted: Any) -> Score | None:
    """The other score of the same dtype whose contender has the ``wanted`` fields."""
    for other in scores:
        same = other.contender.dtype == score.contender.dtype
        if same and all(getattr(other.contender, key) == value for key, value in wanted.items()):
            return other
    return None


def _row(score: Score, scores: list[Score]) -> dict[str, Any]:
    plain = _partner(score, scores, path=score.contender.path, kind="engine", speculation="off")
    eager = _partner(score, scores, kind="transformers")
    return {
        **contender_json(score.contender),
        "tokens": score.tokens,
        "tokens_per_s": score.tokens_per_s,
        "acceptance_length": score.acceptance_length,
        "ratio_to_ar": score.ratio(plain) if plain else None,
        "median_ratio_to_ar": score.median_ratio(plain) if plain else None,
        "ratio_to_transformers": score.ratio(eager) if eager else None,
        "same_ids_as_ar": score.same_ids(plain) if plain else None,
        "peak_memory": score.peak_memory,
        "load_to_first_token_s": score.load_s,
    }


def _table(scores: list[Score]) -> str:
    head = ["", "tokens/s", "x AR", "x transformers", "acceptance", "ids = AR", "peak memory", "load s"]
    rows = [head]
    for score in scores:
        row = _row(score, scores)
        rows.append(
            [
                score.contender.name,
                f"{row['tokens_per_s']:.1f}",
                _ratio(row["ratio_to_ar"]),
                _ratio(row["ratio_to_transformers"]),
                f"{row['acceptance_length']:.2f}",
                "-" if row["same_ids_as_ar"] is None else f"{row['same_ids_as_ar']}/{len(score.answers)}",
                size_text(score.peak_memory),
                f"{score.load_s:.2f}",
            ]
        )
    return table(rows)


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
