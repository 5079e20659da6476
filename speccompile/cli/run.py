"""``speccompile run``: one prompt, a file of prompts, or a dialogue on the terminal."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from speccompile.cli.prompts import Message, read_prompts, single_prompt
from speccompile.cli.sampling import sampling_options, sampling_params
from speccompile.cli.show import echo_json, echo_status
from speccompile.errors import RequestError
from speccompile.runtime.engine import Engine
from speccompile.runtime.params import SamplingParams
from speccompile.runtime.stats import Completion


@click.command("run")
@click.argument("engine", type=click.Path(path_type=Path))
@click.option("-p", "--prompt", default=None, help="The prompt.")
@click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    default=None,
    help='JSONL file with "prompt", "messages" or "turns" per line.',
)
@click.option("--chat", is_flag=True, help="Put prompts through the chat template, as user messages.")
@sampling_options()
@click.option("--no-spec", is_flag=True, help="Decode plainly; the text does not change.")
@click.option("--stream/--no-stream", default=None, help="Show text as it is made. Default: on a terminal.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per answer and line.")
def command(
    engine: Path,
    prompt: str | None,
    prompts: Path | None,
    chat: bool,
    stream: bool | None,
    as_json: bool,
    **sampling: Any,
) -> None:
    """Generate text with an engine.

    Without -p or --prompts, every line of standard input is a prompt; with --chat the dialogue goes on.
    """
    if prompt is not None and prompts is not None:
        raise click.UsageError("give -p or --prompts, not both")
    if as_json and stream:
        raise click.UsageError("--json and --stream contradict each other")
    params = sampling_params(**sampling)
    rows = read_prompts(prompts, chat=chat) if prompts else []
    if prompt is not None:
        rows = [single_prompt(prompt, "1", chat=chat)]
    streaming = not as_json and (sys.stdout.isatty() if stream is None else stream)
    speaker = Speaker(Engine.load(engine), params, streaming=streaming, as_json=as_json)
    if rows:
        for row in rows:
            try:
                row.conversation(speaker.engine.tokenizer, speaker.answer)
            except RequestError as error:
                raise RequestError(
                    f"{prompts}: row {row.name}: {error}" if prompts else str(error)
                ) from error
    else:
        _dialogue(speaker, chat=chat)


class Speaker:
    """Generates answers and shows them."""

    def __init__(self, engine: Engine, params: SamplingParams, *, streaming: bool, as_json: bool) -> None:
        self.engine, self._params = engine, params
        self._streaming, self._as_json = streaming, as_json

    def answer(self, token_ids: list[int], name: str) -> str:
        """Generate, show, and return the text."""
        done = self._stream(token_ids) if self._streaming else self.engine.complete(token_ids, self._params)
        if self._as_json:
            echo_json({"id": name, **dataclasses.asdict(done)})
            return done.text
        if not self._streaming:
            click.echo(done.text)
        echo_status(_closing(done))
        return done.text

    def _stream(self, token_ids: list[int]) -> Completion:
        stream = self.engine.stream(token_ids, self._params)
        for piece in stream:
            click.echo(piece, nl=False)
        click.echo()
        return stream.completion


def _closing(done: Completion) -> str:
    speed = f"{done.tokens_per_s:.1f} tokens/s" if done.completion_tokens else "no tokens"
    return (
        f"[{done.finish_reason}: {done.completion_tokens} tokens, acceptance length "
        f"{done.acceptance_length:.2f}, {speed}]"
    )


def _dialogue(speaker: Speaker, *, chat: bool) -> None:
    """Answer line after line; a refused request is reported and the dialogue goes on."""
    history: list[Message] = []
    for number, line in enumerate(_lines(), 1):
        row = single_prompt(line, str(number), chat=chat, history=history)
        try:
            history = row.conversation(speaker.engine.tokenizer, speaker.answer)
        except RequestError as error:
            echo_status(f"error: {error}")


def _lines() -> Iterator[str]:
    """Non-empty lines of standard input, with a prompt sign on a terminal."""
    while True:
        if sys.stdin.isatty():
            click.echo("> ", nl=False, err=True)
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError as error:
            raise RequestError(f"standard input is not UTF-8 text ({error})") from error
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")
