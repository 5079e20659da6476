"""A tiny target with rollouts on disk, and ways to run ``speccompile train`` on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from click.testing import CliRunner

from speccompile.cli.main import cli
from speccompile.train.run_log import LOG_FILE, read_log
from tests.checkpoint.builders import write_llama, write_tokenizer

ROOT = Path(__file__).parents[2]
SIZES = "--draft-vocab-size 64 --batch-tokens 60 --dtype fp32 --lr 1e-3 --unroll 2"


def make_pair(folder: Path) -> Path:
    """``target`` (tied, one file) and ``cache`` in ``folder``."""
    write_llama(folder / "target", bos_token_id=0, eos_token_id=1, tie_word_embeddings=True)
    write_tokenizer(folder / "target")
    rows = [json.dumps({"prompt": f"the quick brown fox number {i}"}) for i in range(16)]
    (folder / "prompts.jsonl").write_text("\n".join(rows))
    call(
        f"rollout --model {folder}/target --prompts {folder}/prompts.jsonl --output {folder}/cache "
        f"--dtype fp32 --max-answer 12 --max-length 60 --own-prompts 0 --temperatures 0 --answer-tokens 200"
    )
    return folder


def call(line: str) -> str:
    """Runs a command in this process with one thread, like those of ``start``; its standard output."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        result = CliRunner().invoke(cli, line.split(), catch_exceptions=False)
    finally:
        torch.set_num_threads(threads)
    assert result.exit_code == 0, result.output
    return result.stdout


def train_line(folder: Path, output: str, extra: str) -> str:
    where = f"--model {folder}/target --data {folder}/cache --output {folder}/{output}"
    return f"train {where} {SIZES} {extra} --json"


def start(line: str, launcher: str = "") -> subprocess.Popen:
    """Starts a command as a process of its own, or several under a ``launcher``."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *launcher.split(), "-m", "speccompile", *line.split()]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def losses(folder: Path, output: str) -> list[float]:
    """Losses in the run's log."""
    return [r["loss"] for r in read_log(folder / output / LOG_FILE) if r["kind"] == "step"]
