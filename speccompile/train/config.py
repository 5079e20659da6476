"""What a training run is asked for."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from speccompile.errors import ConfigError
from speccompile.train.loss import parse_loss

MAX_LAYERS = 4
_SHORTEST = 4


def option(default: Any, help_text: str) -> Any:
    """A dataclass field that is also a command-line flag."""
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Hyper-parameters of one run; they are stored with its state, and a resumed run must have the same ones.

    The objective is that of EAGLE (arXiv 2401.15077: smooth L1 on the feature, a token loss) over the
    unrolled draft steps of EAGLE-3 (arXiv 2503.01840, section 3), which has no feature loss.
    """

    kind: str = option("eagle1", "eagle1 (EAGLE-1/2) or eagle3.")
    layers: int = option(1, "Decoder layers of the head, 1 to 4.")
    aux_layers: str = option(
        "", "EAGLE-3: target layers whose inputs it reads, as 2,15,27; default 2,N/2,N-3."
    )
    init_layers: str = option("silent", "Fresh layers: silent (output projections zero), or target (live).")
    from_layers: str = option(
        "", "Target layers that fresh layers are copied from, as 0,1,29; default: last."
    )
    layer_norms: str = option(
        "no", "EAGLE-1, yes: the target's norms before the first attention and at the end (our extension)."
    )
    draft_vocab_size: int = option(8192, "Tokens the head can draft: the answers' most frequent ones.")
    train_lm_head: str = option("auto", "yes: the head's own; no: the target's rows; auto: yes for eagle3.")
    steps: int = option(2000, "Optimizer steps.")
    batch_tokens: int = option(1024, "Positions per micro-batch, padding included.")
    accumulate: int = option(1, "Micro-batches per optimizer step, over all processes together.")
    max_length: int = option(2048, "Longer sequences are cut to this many tokens.")
    unroll: int = option(2, "Draft steps trained after each position.")
    decay: float = option(0.8, "Weight of each further draft step, relative to the one before.")
    loss: str = option(
        "kl", "Token loss or mixture, as kl:0.7,lk:0.3; kl, topk-kl, greedy, tv, lk, coupling."
    )
    loss_top_k: int = option(16, "Tokens that topk-kl and coupling look at.")
    feature_weight: float = option(0.1, "EAGLE-1: weight of the feature loss next to the token loss.")
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
        for name in _POSITIVE_INTS:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} {getattr(self, name)}: must be at least 1")
        if self.layers > MAX_LAYERS:
            raise ConfigError(f"layers {self.layers}: a head has 1 to {MAX_LAYERS}")
        if not 0 <= self.held_out_percent < 100:
            raise ConfigError(f"held_out_percent {self.held_out_percent}: must be 0 to 99")
        for name in ("lr", "decay", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} {getattr(self, name)}: must be positive and finite")
        for name, most in (("weight_decay", math.inf), ("feature_weight", math.inf), ("warmup", 1.0)):
            if not 0 <= getattr(self, name) <= most or getattr(self, name) == math.inf:
                raise ConfigError(
                    f"{name} {getattr(self, name)}: must be finite, 0 or more, warmup at most 1"
                )
        if self.max_length < _SHORTEST:
            raise ConfigError(f"max_length {self.max_length}: must be at least {_SHORTEST}")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed {self.seed}: must be 0 to 2^63 - 1")
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} {getattr(self, name)!r}: must be one of {', '.join(known)}")
        parse_loss(self.loss, self.loss_top_k)
        if self.kind == "eagle1" and self.aux_layers:
            raise ConfigError("aux_layers: only an EAGLE-3 head reads them; give kind eagle3")
        if self.kind == "eagle3" and self.layer_norms == "yes":
            raise ConfigError("layer_norms: an EAGLE-3 head always has them; leave it out")
        self.layer_list("aux_layers")
        self.layer_list("from_layers")

    @property
    def owns_lm_head(self) -> bool:
        """Whether the head has a trainable ``lm_head`` in place of the target's rows."""
        return self.train_lm_head == "yes" or (self.train_lm_head == "auto" and self.kind == "eagle3")

    def layer_list(self, name: str) -> tuple[int, ...]:
        """``aux_layers`` or ``from_layers`` as numbers; empty when not given."""
        text = getattr(self, name)
        try:
            layers = tuple(int(part) for part in text.split(",") if part.strip())
        except ValueError:
            layers = (-1,)
        if any(layer < 0 for layer in layers):
            raise ConfigError(f"{name} {text!r}: must be layer numbers with commas, as in 2,15,27")
        return layers

    def to_json(self) -> dict[str, Any]:
        """Plain form stored with the state."""
        return asdict(self)


_POSITIVE_INTS = (
    "layers", "draft_vocab_size", "steps", "batch_tokens", "accumulate", "max_length", "unroll", "loss_top_k",
    "eval_sequences",
)  # fmt: skip
_CHOICES = {
    "kind": ("eagle1", "eagle3"),
    "init_layers": ("silent", "target"),
    "train_lm_head": ("auto", "yes", "no"),
    "layer_norms": ("no", "yes"),
    "supervise": ("answers", "all"),
    "dtype": ("bf16", "fp32"),
}
