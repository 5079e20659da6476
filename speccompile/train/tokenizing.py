"""The run-time tokenizer of a target checkpoint."""

from __future__ import annotations

import tempfile
from pathlib import Path

from speccompile.checkpoint.target import Target
from speccompile.checkpoint.tokenizer import Tokenizer


def target_tokenizer(target: Target) -> Tokenizer:
    """Reads the target's tokenizer files the way an engine directory carries them."""
    with tempfile.TemporaryDirectory() as folder:
        target.tokenizer.write(Path(folder))
        return Tokenizer.from_dir(Path(folder))
