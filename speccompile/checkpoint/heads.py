"""EAGLE draft heads on disk: recognise the format, validate everything, hand out tensors.

:func:`open_head` turns a folder of any supported format into a :class:`Head` with one vocabulary of tensor
names (:mod:`speccompile.checkpoint.head_layout`).  Whether a head fits a target is
:mod:`speccompile.checkpoint.pair`'s question.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from speccompile.checkpoint.config import HeadConfig, LlamaConfig
from speccompile.checkpoint.head_config import HeadOverrides, head_config
from speccompile.checkpoint.head_formats import recognise
from speccompile.checkpoint.head_formats.base import HeadFacts, RawHead, stored_names
from speccompile.checkpoint.head_layout import head_shapes
from speccompile.checkpoint.head_refusals import refuse_config, refuse_tensors, refuse_training_state
from speccompile.checkpoint.head_vocab import draft_offsets
from speccompile.checkpoint.target import check_finite, check_tensor
from speccompile.checkpoint.tensors import TensorSource, open_tensors, read_json
from speccompile.errors import CheckpointError

__all__ = ["Head", "HeadOverrides", "open_head"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Head:
    """A validated head.  ``format_name`` says which reader took it; ``d2t`` is int64 [U] or None."""

    path: Path
    config: HeadConfig
    format_name: str
    source: TensorSource
    stored: dict[str, str]
    d2t: Tensor | None

    def names(self) -> tuple[str, ...]:
        """Canonical names of all tensors, ``d2t`` included when the draft vocabulary is reduced."""
        return tuple(head_shapes(self.config))

    def tensor(self, name: str) -> Tensor:
        """One tensor by canonical name, in the dtype of the file (``d2t``: int64 offsets)."""
        if name not in head_shapes(self.config):
            raise KeyError(f"{name} is not a tensor of this head")
        if name == "d2t" and self.d2t is not None:
            return self.d2t
        return self.source.get(self.stored[name])

    def check_values(self, dtype: torch.dtype | None = None) -> None:
        """Reads every weight once and raises :class:`CheckpointError` for the first with NaN or infinity,
        or with a value that ``dtype`` cannot hold.
        """
        for name in self.names():
            if name != "d2t":
                check_finite(self.source, self.stored[name], dtype)

    def digest_files(self) -> list[Path]:
        """Every file that the engine depends on."""
        folder = self.path if self.path.is_dir() else self.path.parent
        return [folder / "config.json", *self.source.files()]

    def sharing_embedding(self) -> Head:
        """The same head reading the target's embedding in place of its own."""
        return replace(self, config=replace(self.config, own_embedding=False))


def open_head(path: Path, target_config: LlamaConfig, *, overrides: HeadOverrides | None = None) -> Head:
    """Opens a head folder (or a weight file beside its ``config.json``) and checks all but values.

    ``target_config`` supplies only the number of layers for the default aux layers.  Raises
    :class:`CheckpointError` naming file, tensor or key, and the remedy.
    """
    raw = _open_raw(path)
    head_format = recognise(raw)
    facts = head_format.read(raw)
    _check_claims(raw, facts)
    config = head_config(raw, facts, target_config, overrides or HeadOverrides())
    _check_tensors(raw, config, facts)
    _check_shared_parts(raw, config)
    return Head(
        path=path,
        config=config,
        format_name=head_format.name,
        source=raw.source,
        stored=raw.stored,
        d2t=_read_offsets(raw, config),
    )


def _open_raw(path: Path) -> RawHead:
    if not path.exists():
        raise CheckpointError(f"{path}: no such head folder or file")
    folder = path if path.is_dir() else path.parent
    refuse_training_state(folder)
    config_path = folder / "config.json"
    config = read_json(config_path)
    refuse_config(config_path, config)
    source = open_tensors(path)
    refuse_tensors(folder, source)
    raw = RawHead(config_path=config_path, config=config, source=source, stored=stored_names(source))
    block = config.get("transformer_layer_config") or config
    if block.get("hidden_act", "silu") != "silu":
        raise raw.error(f"hidden_act {block['hidden_act']!r} is not supported; only 'silu' is")
    if "sliding_attention" in (block.get("layer_types") or ()):
        raise raw.error("a draft with sliding-window attention is not supported")
    return raw


def _check_claims(raw: RawHead, facts: HeadFacts) -> None:
    for claim in facts.claims:
        if claim.present and not raw.has(claim.tensor):
            raise raw.missing(claim.tensor, claim.because)
        if not claim.present and raw.has(claim.tensor):
            raise raw.tensor_error(claim.tensor, f"contradicts the config: {claim.because}")


def _check_tensors(raw: RawHead, config: HeadConfig, facts: HeadFacts) -> None:
    """Names, shapes and dtypes against the one table."""
    expected = head_shapes(config)
    unused = {"d2t"} | (set() if facts.final_norm else {"norm.weight"})
    for name in raw.stored:
        if name not in expected and name not in unused:
            raise raw.tensor_error(name, f"is unexpected; a head of this kind has no {name!r}")
    for name, shape in expected.items():
        if name == "d2t":
            continue
        if not raw.has(name):
            raise raw.missing(name)
        check_tensor(raw.source, raw.stored[name], shape)


def _check_shared_parts(raw: RawHead, config: HeadConfig) -> None:
    """What the head takes from the target must exist there, with the head's width."""
    if config.hidden_size != config.target_hidden_size:
        _check_own_width(raw, config)
    if config.kind == "eagle3" and config.draft_vocab_size < config.vocab_size and not config.own_lm_head:
        raise raw.missing("lm_head.weight", "an EAGLE-3 head with a reduced vocabulary has its own")


def _check_own_width(raw: RawHead, config: HeadConfig) -> None:
    """A head of another width than its target can share neither the hidden state nor any matrix."""
    sizes = f"hidden_size {config.hidden_size} differs from target_hidden_size {config.target_hidden_size}"
    if config.kind == "eagle1" or not config.has_fc:
        raise raw.error(f"{sizes}, but this head reads the target's hidden state as it is")
    for own, name in ((config.own_embedding, "embed_tokens.weight"), (config.own_lm_head, "lm_head.weight")):
        if not own:
            raise raw.missing(name, f"{sizes}, so the target's cannot be used")


def _read_offsets(raw: RawHead, config: HeadConfig) -> Tensor | None:
    d2t = raw.source.get(raw.stored["d2t"]) if raw.has("d2t") else None
    t2d = raw.source.get("t2d") if "t2d" in raw.source.names() else None
    where = str(raw.source.files()[0])
    return draft_offsets(d2t, t2d, config.draft_vocab_size, config.vocab_size, where)
