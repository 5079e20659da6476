"""The sampling flags of ``run`` and ``verify``, and the request parameters they stand for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from speccompile.runtime.params import SamplingParams

_DEFAULT = SamplingParams()


def sampling_options(
    *, temperature: float = _DEFAULT.temperature, seed: int | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator that adds the sampling flags; the command receives them as keyword arguments."""
    seed_help = "Same seed, same text." + ("  Fresh entropy if not given." if seed is None else "")
    options = (
        click.option("--max-tokens", type=int, default=_DEFAULT.max_tokens, help="Most tokens to generate."),
        click.option("--temperature", type=float, default=temperature, help="0 is greedy."),
        click.option("--top-k", type=int, default=_DEFAULT.top_k, help="0 switches it off."),
        click.option("--top-p", type=float, default=_DEFAULT.top_p, help="1 switches it off."),
        click.option("--min-p", type=float, default=_DEFAULT.min_p, help="0 switches it off."),
        click.option("--seed", type=int, default=seed, help=seed_help),
        click.option("--stop", multiple=True, help="Text that ends the output; may be given several times."),
        click.option(
            "--tree",
            "speculation",
            default="auto",
            help="Draft tree: auto (the tuned table, else the engine's), a name, a file, or off.",
        ),
    )

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def sampling_params(*, no_spec: bool = False, **flags: Any) -> SamplingParams:
    """Parameters from the flags of :func:`sampling_options`; RequestError names a wrong field."""
    if no_spec and flags["speculation"] != "auto":
        raise click.UsageError("--no-spec and --tree contradict each other")
    return SamplingParams(**{**flags, "speculation": "off" if no_spec else flags["speculation"]})
