"""The tokenizer of a checkpoint, as the files an engine directory carries.

``tokenizer.json`` (the ``tokenizers`` library's format), ``tokenizer_config.json`` (special tokens and chat
template), ``chat_template.jinja`` when the source has one, and ``generation_config.json`` with the ids of BOS
and of every EOS token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from speccompile.checkpoint.tensors import read_json, read_text
from speccompile.errors import CheckpointError

TOKENIZER_FILE_NAMES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """File contents; ``bos_token_id`` and ``eos_token_ids`` come from the model config."""

    tokenizer_json: str
    tokenizer_config: dict[str, Any]
    chat_template: str | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    def write(self, dest: Path) -> None:
        """Writes the files into the existing folder ``dest``."""
        (dest / "tokenizer.json").write_text(self.tokenizer_json, encoding="utf-8")
        config = dict(self.tokenizer_config)
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
            (dest / "chat_template.jinja").write_text(self.chat_template, encoding="utf-8")
        _write_json(dest / "tokenizer_config.json", config)
        generation = {"bos_token_id": self.bos_token_id, "eos_token_id": _one_or_list(self.eos_token_ids)}
        _write_json(dest / "generation_config.json", {k: v for k, v in generation.items() if v is not None})


def _one_or_list(ids: Sequence[int]) -> int | list[int] | None:
    return None if not ids else ids[0] if len(ids) == 1 else list(ids)


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_tokenizer_files(
    folder: Path, bos_token_id: int | None, eos_token_ids: tuple[int, ...]
) -> TokenizerFiles:
    """The tokenizer of a Hugging Face folder; :class:`CheckpointError` when it is missing or unreadable."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(
            f"{path}: file not found; a checkpoint with only tokenizer.model needs converting once: "
            f"transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    load_tokenizer(path)
    config_path, template_path = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    return TokenizerFiles(
        tokenizer_json=read_text(path),
        tokenizer_config=read_json(config_path) if config_path.is_file() else {},
        chat_template=read_text(template_path) if template_path.is_file() else None,
        bos_token_id=bos_token_id,
        eos_token_ids=eos_token_ids,
    )


def load_tokenizer(path: Path) -> tokenizers.Tokenizer:
    """``tokenizer.json`` through the ``tokenizers`` library; damage becomes a :class:`CheckpointError`."""
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library has no class of its own for damage
        raise CheckpointError(f"{path}: not readable as a tokenizer ({error})") from error
