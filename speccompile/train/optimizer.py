"""AdamW over the head's trainable weights, with linear warm-up and cosine decay.

Learning rates are an order below the usual: features have rms 2 and outliers of 50, so a coherent Adam step
on ``fc`` moves its output by far more than the step's size.  ``fc`` starts at its linear optimum and gets
a further reduced rate, lowest for EAGLE-3, whose aux features are some ten times larger than its stream.
"""

from __future__ import annotations

import math

import torch

from speccompile.model.eagle import EagleHead
from speccompile.train.config import TrainConfig

_FC_RATE = {"eagle1": 0.3, "eagle3": 0.03}


def make_optimizer(head: EagleHead, config: TrainConfig) -> torch.optim.AdamW:
    """Groups carry ``rate``, their share of the learning rate; weight decay applies to matrices only."""
    named = [(n, p) for n, p in head.named_parameters() if p.requires_grad]
    fusion = [p for n, p in named if n.startswith("fc.")]
    matrices = [p for n, p in named if not n.startswith("fc.") and p.dim() > 1]
    vectors = [p for n, p in named if not n.startswith("fc.") and p.dim() < 2]
    return torch.optim.AdamW(
        [
            {"params": matrices, "rate": 1.0, "weight_decay": config.weight_decay},
            {"params": vectors, "rate": 1.0, "weight_decay": 0.0},
            {"params": fusion, "rate": _FC_RATE[head.config.kind], "weight_decay": 0.0},
        ],
        lr=config.lr,
        betas=(0.9, 0.95),
        fused=True,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, config: TrainConfig, step: int) -> None:
    """Sets the rate of optimizer step ``step`` (from 0) in every group."""
    for group in optimizer.param_groups:
        group["lr"] = group["rate"] * learning_rate(config, step)


def learning_rate(config: TrainConfig, step: int) -> float:
    """Rate of optimizer step ``step`` before the groups' shares."""
    warmup = max(1, round(config.warmup * config.steps))
    if step < warmup:
        return config.lr * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, config.steps - warmup))
    return config.lr * 0.5 * (1 + math.cos(math.pi * progress))
