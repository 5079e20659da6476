"""What every head format shares: the opened file, the facts a format extracts, and the format record.

Tensors decide what a head is.  A format adds only what tensors cannot say: where the Llama fields are, how
aux layers are numbered, which residual flavour was trained, and which claims of its config must hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speccompile.checkpoint.config import HeadKind
from speccompile.checkpoint.head_layout import Shape, canonical_name
from speccompile.checkpoint.tensors import TensorSource
from speccompile.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class RawHead:
    """A head as it lies on disk.  ``stored`` maps canonical names to the names in the file."""

    config_path: Path
    config: dict[str, Any]
    source: TensorSource
    stored: dict[str, str]

    @property
    def folder(self) -> Path:
        return self.config_path.parent

    @property
    def eagle_config(self) -> dict[str, Any]:
        """Nested block of ModelOpt and SpecForge; empty when there is none."""
        return self.config.get("eagle_config") or {}

    def has(self, name: str) -> bool:
        """Whether the file holds a canonical tensor."""
        return name in self.stored

    def shape(self, name: str) -> Shape:
        """Shape of a canonical tensor; :class:`CheckpointError` when it is missing."""
        if name not in self.stored:
            raise self.missing(name)
        shape = tuple(self.source.shape(self.stored[name]))
        if not shape:
            raise self.tensor_error(name, "is a scalar")
        return shape

    def positive_int(self, block: dict[str, Any], key: str) -> int | None:
        """A size from the configuration; None when it is absent or null."""
        value = block.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value <= 0):
            raise self.error(f"{key} must be a positive integer, found {value!r}")
        return value

    def kind(self) -> HeadKind:
        """EAGLE-3 when the first attention reads embedding and hidden side by side, else EAGLE-1."""
        hidden = self.shape("layers.0.self_attn.o_proj.weight")[0]
        shape = self.shape("layers.0.self_attn.q_proj.weight")
        kinds: dict[Shape, HeadKind] = {(hidden,): "eagle1", (2 * hidden,): "eagle3"}
        if shape[1:] not in kinds:
            raise self.tensor_error(
                "layers.0.self_attn.q_proj.weight",
                f"has shape {list(shape)}; the first layer of a head takes {hidden} (EAGLE-1) or "
                f"{2 * hidden} (EAGLE-3) inputs",
            )
        return kinds[shape[1:]]

    def error(self, text: str) -> CheckpointError:
        """An error about the configuration or the head as a whole."""
        return CheckpointError(f"{self.config_path}: {text}")

    def tensor_error(self, name: str, text: str) -> CheckpointError:
        """An error about one canonical tensor, naming its file and stored name."""
        stored = self.stored[name]
        return CheckpointError(f"{self.folder / self.source.where(stored)}: tensor {stored!r} {text}")

    def missing(self, name: str, because: str = "") -> CheckpointError:
        """The error for a tensor that is not there."""
        file = self.source.files()[0]
        reason = f" ({because})" if because else ""
        return CheckpointError(
            f"{file}: tensor {name!r} is missing{reason}; the head is incomplete, copy it again"
        )


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A tensor that must be in the file (``present``) or must not, and the reason for the message."""

    tensor: str
    present: bool
    because: str


@dataclass(frozen=True, kw_only=True)
class HeadFacts:
    """What a format reads from the configuration.

    ``llama`` holds the plain Llama fields.  ``aux_layers`` is in our numbering; None means not stated.
    ``norm_before_residual`` None means that the file does not say and the user must.  ``final_norm`` False
    means that a stored final norm is not applied.
    """

    llama: dict[str, Any]
    draft_vocab_size: int | None = None
    target_hidden_size: int | None = None
    aux_layers: tuple[int, ...] | None = None
    norm_before_residual: bool | None = False
    norm_feedback: bool = False
    first_input_norm: bool = False
    final_norm: bool = True
    claims: tuple[Claim, ...] = ()


@dataclass(frozen=True, kw_only=True)
class HeadFormat:
    """One on-disk format: how it is recognised and how its configuration is read."""

    name: str
    matches: Callable[[RawHead], bool]
    read: Callable[[RawHead], HeadFacts]


def stored_names(source: TensorSource) -> dict[str, str]:
    """Canonical to stored names; two stored tensors with one meaning are an error."""
    stored: dict[str, str] = {}
    for name in source.names():
        canonical = canonical_name(name)
        if canonical is None:
            continue
        if canonical in stored:
            raise CheckpointError(
                f"{source.files()[0]}: tensors {stored[canonical]!r} and {name!r} have the same meaning"
            )
        stored[canonical] = name
    return stored


def claims_of(config: dict[str, Any], keys: dict[str, str]) -> tuple[Claim, ...]:
    """One claim per key that the config states: ``keys`` maps a boolean key to the tensor it speaks of."""
    return tuple(
        Claim(
            tensor=tensor,
            present=bool(config[key]),
            because=f"{key!r} is {'not ' if config[key] else ''}false",
        )
        for key, tensor in keys.items()
        if config.get(key) is not None
    )


EAGLE1_CLAIMS = (Claim(tensor="fc.weight", present=True, because="every EAGLE-1 head has it"),)
EAGLE3_CLAIMS = (
    Claim(tensor="fc.weight", present=True, because="every head of this format has it"),
    Claim(tensor="norm.weight", present=True, because="every head of this format has it"),
)
