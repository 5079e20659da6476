"""The sampling flags of ``run`` and ``verify``, and the request parameters they stand for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from speccompile.runtime.params import SamplingParams

_DEFAULT = SamplingParams()

_OPTIONS = (
    click.option("--max-tokens", type=int, default=_DEFAULT.max_tokens, help="Most tokens to generate."),
    click.option("--temperature", type=float, default=_DEFAULT.temperature, help="0 is greedy."),
    click.option("--top-k", type=int, default=_DEFAULT.top_k, help="0 switches it off."),
    click.option("--top-p", type=float, default=_DEFAULT.top_p, help="1 switches it off."),
    click.option("--min-p", type=float, default=_DEFAULT.min_p, help="0 switches it off."),
    click.option("--seed", type=int, default=None, help="Same seed, same text; fresh entropy if not given."),
    click.option("--stop", multiple=True, help="Text that ends the output; may be given several times."),
    click.option("--tree", "speculation", default="auto", help="Draft tree: a name, a file, or off."),
)


def sampling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the sampling flags to a command, which receives them as keyword arguments."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def sampling_params(*, no_spec: bool = False, **flags: Any) -> SamplingParams:
    """Parameters from the flags of :func:`sampling_options`; RequestError names a wrong field."""
    if no_spec and flags["speculation"] != "auto":
        raise click.UsageError("--no-spec and --tree contradict each other")
    return SamplingParams(**{**flags, "speculation": "off" if no_spec else flags["speculation"]})
