"""A tiny random target with a tokenizer and an EAGLE-1 head for it, as folders on disk."""

from __future__ import annotations

from pathlib import Path

from tests.checkpoint.builders import write_llama, write_tokenizer
from tests.checkpoint.head_builders import VOCAB, H, safeailab1


def write_pair(folder: Path) -> tuple[Path, Path]:
    """Paths of target and head."""
    target, draft = folder / "target", folder / "draft"
    write_llama(target, hidden_size=H, vocab_size=VOCAB, bos_token_id=0, eos_token_id=1)
    write_tokenizer(target)
    return target, safeailab1(draft)
