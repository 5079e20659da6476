"""What a training run is asked for."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from speccompile.errors import ConfigError


def option(default: Any, help_text: str) -> Any:
    """A dataclass field that is also a command-line flag."""
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Hyper-parameters of one run; they are stored with its state, and a resumed run must have the same ones.

    The losses are those of EAGLE (arXiv 2401.15077: smooth L1 on the feature, soft cross-entropy) over the
    unrolled draft steps of EAGLE-3 (arXiv 2503.01840, section 3).
    """

    layers: int = option(1, "Decoder layers of the head.")
    draft_vocab_size: int = option(8192, "Tokens the head can draft: the answers' most frequent ones.")
    steps: int = option(2000, "Optimizer steps.")
    batch_tokens: int = option(1024, "Positions per optimizer step, padding included.")
    max_length: int = option(2048, "Longer sequences are cut to this many tokens.")
    unroll: int = option(2, "Draft steps trained after each position.")
    decay: float = option(0.8, "Weight of each further draft step, relative to the one before.")
    feature_weight: float = option(0.1, "Weight of the feature loss next to the token loss.")
    supervise: str = option("answers", "answers, or all: prompt tokens give labels too.")
    lr: float = option(1e-4, "Peak learning rate of AdamW.")
    warmup: float = option(0.05, "Share of the steps with a rising learning rate.")
    weight_decay: float = option(0.01, "Decoupled weight decay of matrices.")
    clip: float = option(1.0, "Largest gradient norm.")
    seed: int = option(0, "Seed of data order.")
    dtype: str = option("bf16", "Arithmetic, bf16 or fp32; master weights are always fp32.")
    held_out_percent: int = option(2, "Percentage of prompts whose rollouts only measure acceptance.")
    eval_sequences: int = option(100, "Most held-out sequences that are measured.")

    def __post_init__(self) -> None:
        for name in ("layers", "draft_vocab_size", "steps", "batch_tokens", "max_length", "unroll"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} {getattr(self, name)}: must be at least 1")
        if not 0 <= self.held_out_percent < 100:
            raise ConfigError(f"held_out_percent {self.held_out_percent}: must be 0 to 99")
        for name in ("lr", "decay", "clip"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} {getattr(self, name)}: must be positive")
        for name, known in (("supervise", ("answers", "all")), ("dtype", ("bf16", "fp32"))):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} {getattr(self, name)!r}: must be one of {', '.join(known)}")

    def to_json(self) -> dict[str, Any]:
        """Plain form stored with the state."""
        return asdict(self)
