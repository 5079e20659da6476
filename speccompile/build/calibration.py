"""Texts on which a quantized target is compared with the unquantized one.

A few short texts of our own come with the package; ``--calibration`` names others, in any row form that
:mod:`speccompile.train.rows` reads, best the kind of text that the engine is for.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor

from speccompile.checkpoint.tokenizer import Tokenizer
from speccompile.checkpoint.tokenizer_files import TokenizerFiles
from speccompile.errors import ConfigError
from speccompile.train.row_ids import each_row
from speccompile.train.rows import Row, read_rows

BUILT_IN = Path(__file__).resolve().parents[1] / "assets" / "calibration.jsonl"


def read_calibration(path: Path, files: TokenizerFiles, max_tokens: int) -> list[Tensor]:
    """Ids i64 [n], n > 1, of every row, cut to ``max_tokens``.  Raises ConfigError naming file and line."""
    with tempfile.TemporaryDirectory() as folder:
        files.write(Path(folder))
        tokenizer = Tokenizer.from_dir(Path(folder))
    rows, report = read_rows(path)

    def ids(row: Row) -> list[int]:
        if row.text is not None:
            return tokenizer.encode(row.text)
        return tokenizer.encode_chat(list(row.messages), add_generation_prompt=False)

    texts = each_row(rows, ids, report)
    if report.skipped:
        raise ConfigError(f"calibration: {path}: {'; '.join(report.lines())}; remove or repair these rows")
    usable = [torch.tensor(text[:max_tokens]) for text in texts if len(text[:max_tokens]) > 1]
    if not usable:
        raise ConfigError(f"calibration: {path}: no text of 2 tokens or more; give longer ones")
    return usable
