"""The program that rollouts call: ``target_step`` with features wide enough for the trainer.

Eager it is the graph itself.  Compiled by the ``torch`` lowering it decodes faster (SmolLM2-135M in bf16 on
one core, context 200: 520 instead of 300 rows/s at 160 rows, 210 instead of 50 at 4); the result, which holds
the weights, is kept in ``.program/`` of the output folder under a name made of all it depends on, so that the
next run loads it in a second.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from speccompile import __version__
from speccompile.build import isa
from speccompile.build.lowering import get_lowering
from speccompile.build.plugin import build_cpu_plugin, has_compiler, load_plugin
from speccompile.build.programs import export_target_step
from speccompile.errors import BuildError
from speccompile.limits import Limits
from speccompile.model.llama import Llama
from speccompile.model.programs import TargetStep
from speccompile.runtime.programs import Program
from speccompile.train.features import target_digest
from speccompile.train.talk import RolloutConfig

_FOLDER, _NAME = ".program", "target_step"
_WORTH_COMPILING = 50_000
_BLOCK_SIZE = 32
_ROWS_PER_SLOT = 4  # decode rows of all slots leave three quarters of a call to prompts


def rollout_limits(config: RolloutConfig) -> Limits:
    """Sizes of a program that decodes ``config.batch_size`` conversations."""
    return Limits(
        max_batch_size=config.batch_size,
        max_seq_len=config.max_length,
        max_rows=max(64, _ROWS_PER_SLOT * config.batch_size),
        max_tree_depth=1,
        draft_topk=1,
        block_size=_BLOCK_SIZE,
    )


def eager_program(target: Llama, config: RolloutConfig) -> Program:
    """The graph itself, operator by operator; runs on any device."""
    return _module(target, config)


def _module(target: Llama, config: RolloutConfig) -> TargetStep:
    layers = config.stored_layers(target.config.num_hidden_layers)
    return TargetStep(target, layers, with_hidden=bool(layers)).eval()


def make_program(
    target: Llama, config: RolloutConfig, answer_tokens: int, output: Path, say: Callable[[str], None]
) -> Program:
    """The fastest program that ``config.compile`` allows; ``say`` is told which one and why.

    ``auto`` compiles on a CPU with a C++ compiler when many tokens are wanted, ``on`` always (BuildError
    without a compiler), ``off`` never, and then not even our kernels.
    """
    mode = config.compile
    on_cpu = target.embed_tokens.weight.device.type == "cpu"
    if mode == "on" and not on_cpu:
        raise BuildError("compile on: rollouts are compiled for the CPU only; use auto or off")
    if mode == "off" or not on_cpu or (mode == "auto" and not has_compiler()):
        reason = "as asked" if mode == "off" else "no C++ compiler" if on_cpu else "not on the CPU"
        say(f"target runs uncompiled with plain operators: {reason}")
        return eager_program(target, config)
    folder = output / _FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    load_plugin(build_cpu_plugin(folder).path)
    if mode == "auto" and answer_tokens < _WORTH_COMPILING:
        say(f"target runs uncompiled: {answer_tokens} answer tokens are fewer than {_WORTH_COMPILING}")
        return eager_program(target, config)
    return _compiled(target, config, folder, say)


def _compiled(target: Llama, config: RolloutConfig, folder: Path, say: Callable[[str], None]) -> Program:
    lowering, limits = get_lowering("torch"), rollout_limits(config)
    home = folder / _key(target, config, limits)
    if not home.is_dir():
        say(f"compile the target into {home} (about a minute; later runs reuse it)")
        try:
            with tempfile.TemporaryDirectory(dir=folder) as part:
                new = Path(part) / home.name
                new.mkdir()
                lowering.compile(export_target_step(_module(target, config), target, limits), new / _NAME)
                new.rename(home)
        except OSError as error:
            raise BuildError(f"{home}: cannot be written ({error}); free space or use compile off") from error
    return lowering.load(home / _NAME)


def _key(target: Llama, config: RolloutConfig, limits: Limits) -> str:
    """Everything the machine code depends on."""
    parts = {
        "target": target_digest(target),
        "dtype": str(target.embed_tokens.weight.dtype),
        "layers": config.stored_layers(target.config.num_hidden_layers),
        "limits": asdict(limits),
        "threads": torch.get_num_threads(),
        "versions": [torch.__version__, __version__],
        "machine": [isa.machine(), *isa.cpu_features()],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:20]
