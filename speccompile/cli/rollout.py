"""``speccompile rollout``: the target answers prompts; texts and features go into a cache for training."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from speccompile.build.config import TORCH_DTYPES
from speccompile.checkpoint.target import open_target
from speccompile.cli.field_options import field_options, pick
from speccompile.cli.show import echo_json, echo_status
from speccompile.model.load import load_llama
from speccompile.train.sources import Answers, RolloutJob, RolloutSummary, refuse_filled, write_rollouts
from speccompile.train.talk import RolloutConfig
from speccompile.train.tokenizing import target_tokenizer

_ANSWER_TOKENS = 200_000


@click.command("rollout")
@click.option(
    "--model", type=click.Path(path_type=Path), required=True, help="Target: a folder or GGUF file."
)
@click.option("--prompts", type=click.Path(path_type=Path), required=True, help="JSONL of prompts or chats.")
@click.option(
    "--output", type=click.Path(path_type=Path), required=True, help="Cache folder; shards are added."
)
@click.option(
    "--answer-tokens", type=click.IntRange(1), default=None,
    help=f"Stop after this many.  [default: {_ANSWER_TOKENS}; with --once no limit]",
)  # fmt: skip
@click.option(
    "--answers",
    type=click.Choice(["target", "given"]),
    default="target",
    show_default=True,
    help="target: the target writes the answers; given: read those of the data.",
)
@field_options(RolloutConfig)
@click.option("--dtype", type=click.Choice(list(TORCH_DTYPES)), default="bf16", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as one JSON object.")
def command(
    model: Path, prompts: Path, output: Path, answer_tokens: int | None, answers: Answers, dtype: str,
    as_json: bool, **flags: Any,
) -> None:  # fmt: skip
    """Let the target answer prompts (and write its own); keep texts and features for training."""
    config = pick(RolloutConfig, flags)
    if answer_tokens is None and not config.once:
        answer_tokens = _ANSWER_TOKENS
    summary = roll(model, prompts, output, answer_tokens, answers, dtype, config)
    if as_json:
        echo_json(dataclasses.asdict(summary))
    else:
        click.echo(
            f"{output}: {summary.shards} shards, {summary.sequences} conversations, {summary.tokens} tokens, "
            f"{summary.answer_tokens} of them answers"
        )


def roll(
    model: Path, prompts: Path, output: Path, answer_tokens: int | None, answers: Answers, dtype: str,
    config: RolloutConfig,
) -> RolloutSummary:  # fmt: skip
    """The work of the command, with a progress bar on standard error; ``train`` uses it too."""
    prefix = f"s{config.seed}"
    refuse_filled(output, prefix)
    target = open_target(model)
    echo_status(f"load {model}")
    graph = load_llama(target.config, target.tensor, TORCH_DTYPES[dtype])
    with tqdm(total=answer_tokens, unit="tok", file=sys.stderr, disable=None, desc="answers") as bar:
        job = RolloutJob(
            data=prompts,
            output=output,
            answers=answers,
            answer_tokens=answer_tokens,
            prefix=prefix,
            say=lambda line: bar.write(line, file=sys.stderr),
            tick=bar.update,
        )
        return write_rollouts(graph, target_tokenizer(target), config, job)
