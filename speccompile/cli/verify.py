"""``speccompile verify``: the losslessness promise, checked on prompts of your own."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import click

from speccompile.cli.prompts import read_prompts
from speccompile.cli.sampling import sampling_options, sampling_params
from speccompile.cli.show import echo_json, echo_status, table
from speccompile.errors import ConfigError
from speccompile.runtime.engine import Engine
from speccompile.verify import TOLERANCE, Comparison, compare


@click.command("verify")
@click.argument("engine", type=click.Path(path_type=Path))
@click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    required=True,
    help='JSONL file with "prompt", "messages" or "turns" (the first is used) per line.',
)
@click.option("--chat", is_flag=True, help="Put prompts through the chat template, as user messages.")
@sampling_options(temperature=1.0, seed=0)
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    default=None,
    help="Largest gap, in logits, at a first difference. Default: two rounding steps of the engine's dtype.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    engine: Path, prompts: Path, chat: bool, tolerance: float | None, as_json: bool, **sampling: Any
) -> None:
    """Compare speculative with plain decoding, greedy and sampled, token by token.

    Exit code 1 if a first difference sits where the two best scores are further apart than the tolerance.
    """
    sampled = sampling_params(**sampling)
    modes = [dataclasses.replace(sampled, temperature=0.0), *([sampled] if sampled.temperature else [])]
    rows = read_prompts(prompts, chat=chat)
    loaded = Engine.load(engine)
    if tolerance is not None and not tolerance >= 0:
        raise ConfigError(f"--tolerance {tolerance}: must be 0 or more")
    limit = TOLERANCE[loaded.manifest.config.dtype] if tolerance is None else tolerance
    found: list[Comparison] = []
    for row in rows:
        for params in modes:

            def answer(token_ids: list[int], name: str, params: Any = params) -> str:
                comparison, text = compare(loaded, name, token_ids, params)
                found.append(comparison)
                return text

            row.conversation(loaded.tokenizer, answer, only_first=True)
            echo_status(_line(found[-1]))
    failures = [c for c in found if c.difference and c.difference.gap > limit]
    _report(found, failures, limit, as_json)
    sys.exit(1 if failures else 0)


def _line(comparison: Comparison) -> str:
    state = "equal" if comparison.difference is None else f"differs at token {comparison.difference.index}"
    return f"{comparison.name} T={comparison.temperature:g}: {comparison.tokens} tokens, {state}"


def _report(found: list[Comparison], failures: list[Comparison], limit: float, as_json: bool) -> None:
    differing = [c for c in found if c.difference]
    if as_json:
        echo_json(
            {
                "passed": not failures,
                "tolerance": limit,
                "compared": len(found),
                "tokens": sum(c.tokens for c in found),
                "different": len(differing),
                "comparisons": [dataclasses.asdict(c) for c in found],
            }
        )
        return
    if differing:
        click.echo(table([("prompt", "T", "token", "plain", "speculative", "gap"), *map(_row, differing)]))
    click.echo(
        f"{len(found)} comparisons, {sum(c.tokens for c in found)} tokens, {len(differing)} differ, "
        f"{len(failures)} by a gap above {limit:g}"
    )


def _row(comparison: Comparison) -> tuple[Any, ...]:
    difference = comparison.difference
    assert difference is not None
    return (
        comparison.name,
        f"{comparison.temperature:g}",
        difference.index,
        difference.plain_token,
        difference.speculative_token,
        f"{difference.gap:.4g}",
    )
