"""``speccompile demo``: prepare the demo folder, generate, report; exit code 1 if the ids differ."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import click

from speccompile import demo
from speccompile.build.progress import Progress
from speccompile.cli.show import echo_json, echo_status, table


@click.command("demo")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=Path("demo-output"),
    show_default=True,
    help="Folder for target/, draft/ and engine/; what is there is reused.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(output: Path, as_json: bool) -> None:
    """Build the SmolLM2 demo engine and generate without and with speculation."""
    progress = Progress(echo_status)
    engine = demo.prepare(output, progress)
    result = demo.run(engine, progress)
    if as_json:
        echo_json(_as_json(engine, result))
    else:
        click.echo(_card(engine, result))
    sys.exit(0 if result.ids_equal else 1)


def _as_json(engine: Path, result: demo.DemoResult) -> dict[str, Any]:
    return {
        "engine": str(engine),
        "ids_equal": result.ids_equal,
        "acceptance_length": result.acceptance_length,
        "plain_tokens_per_s": result.plain_tokens_per_s,
        "speculative_tokens_per_s": result.speculative_tokens_per_s,
        "ratio": result.ratio,
        "answers": [
            {**dataclasses.asdict(answer), "ids_equal": answer.ids_equal} for answer in result.answers
        ],
    }


def _card(engine: Path, result: demo.DemoResult) -> str:
    texts = [f"> {answer.prompt}\n{answer.speculative.text.strip()}" for answer in result.answers]
    rows: list[tuple[str, ...]] = [
        ("prompt", "tokens", "plain tok/s", "speculative tok/s", "acceptance", "ids")
    ]
    for number, answer in enumerate(result.answers, 1):
        rows.append(
            (
                str(number),
                str(answer.plain.completion_tokens),
                f"{answer.plain.tokens_per_s:.1f}",
                f"{answer.speculative.tokens_per_s:.1f}",
                f"{answer.speculative.acceptance_length:.2f}",
                "equal" if answer.ids_equal else "DIFFER",
            )
        )
    closing = (
        f"ids equal: {'yes' if result.ids_equal else 'NO'}\n"
        f"acceptance length (accepted + bonus per target call): {result.acceptance_length:.2f}\n"
        f"tokens/s: {result.plain_tokens_per_s:.1f} plain, "
        f"{result.speculative_tokens_per_s:.1f} speculative, ratio {result.ratio:.2f}\n"
        f"engine: {engine} (try: speccompile run {engine} --chat)"
    )
    return "\n\n".join([*texts, table(rows), closing])
