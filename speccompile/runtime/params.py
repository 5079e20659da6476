"""What a request may ask for: sampling, stopping, seed and speculation, validated once.

Filters apply in the order temperature, top-k, top-p, min-p.  ``seed=None`` takes fresh entropy from
the operating system when the request is submitted; the seed used is part of the result, so that any
answer can be drawn again.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from speccompile.errors import ConfigError, RequestError
from speccompile.tree.named import OFF, resolve_tree
from speccompile.tree.tree import Tree

MAX_SEED = 2**63 - 1
Default = TypeVar("Default")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Parameters of one request.  Raises RequestError naming the field.

    max_tokens: most tokens to generate (0: an empty completion, finish_reason ``length``).
    temperature: 0 is greedy.  top_k 0, top_p 1 and min_p 0 switch the filter off.
    seed: 0 .. 2**63 - 1, or None.
    stop: strings that end the text before them; stop_token_ids: ids that end it like EOS.
    ignore_eos: generate past EOS (stop ids and strings still count).
    speculation: ``auto`` (the engine's tree table, or its tree if it was not tuned), ``off``, a tree name,
    file, list of rank paths, or a Tree.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    speculation: Any = "auto"

    def __post_init__(self) -> None:
        _check_int("max_tokens", self.max_tokens)
        _check_int("top_k", self.top_k)
        if self.seed is not None:
            _check_int("seed", self.seed)
        _check_number("temperature", self.temperature, math.inf)
        _check_number("top_p", self.top_p, 1.0)
        _check_number("min_p", self.min_p, 1.0)
        if self.top_p == 0:
            raise RequestError(
                "top_p must be above 0 (1 switches the filter off); for greedy use temperature 0"
            )
        _check_items("stop", self.stop_strings, lambda s: type(s) is str and s != "", "non-empty strings")
        _check_items("stop_token_ids", self.stop_token_ids, lambda t: type(t) is int and t >= 0, "token ids")
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos must be true or false, got {self.ignore_eos!r}")
        self.tree(default=OFF)

    @property
    def stop_strings(self) -> Sequence[str]:
        """``stop`` as a list, also where a single string was given."""
        return (self.stop,) if isinstance(self.stop, str) else self.stop

    def tree(self, default: Default) -> Tree | Default:
        """The tree asked for; ``default`` for ``auto``.  Raises RequestError."""
        if isinstance(self.speculation, str) and self.speculation == "auto":
            return default
        try:
            return resolve_tree(self.speculation)
        except ConfigError as error:
            raise RequestError(f"speculation: {error}") from error


def fresh_seed() -> int:
    """A seed from the operating system's entropy."""
    return secrets.randbelow(MAX_SEED + 1)


def _check_int(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_SEED:
        raise RequestError(f"{name} must be an integer from 0, got {value!r}")


def _check_number(name: str, value: Any, high: float) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not 0 <= value <= high:
        upper = "" if high == math.inf else f" and at most {high:g}"
        raise RequestError(f"{name} must be a finite number of at least 0{upper}, got {value!r}")


def _check_items(name: str, value: Any, good: Callable[[Any], bool], wanted: str) -> None:
    if not isinstance(value, Sequence) or not all(map(good, value)):
        raise RequestError(f"{name} must be a list of {wanted}, got {value!r}")
