"""``speccompile train``: an EAGLE head by online distillation, from prompts or from a rollout cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import torch

from speccompile.build.config import TORCH_DTYPES
from speccompile.checkpoint.heads import open_head
from speccompile.checkpoint.pair import check_pair
from speccompile.checkpoint.target import Target, open_target
from speccompile.cli.field_options import field_options, pick
from speccompile.cli.rollout import roll
from speccompile.cli.show import echo_status
from speccompile.cli.train_log import TrainLog
from speccompile.errors import ConfigError
from speccompile.model.load import load_head, load_llama
from speccompile.train.cache import RolloutCache
from speccompile.train.config import TrainConfig
from speccompile.train.rollout import RolloutConfig
from speccompile.train.tokenizing import target_tokenizer
from speccompile.train.trainer import STATE_FILE, Trainer

_ROLLOUTS = "rollouts"


@click.command("train")
@click.option(
    "--model", type=click.Path(path_type=Path), required=True, help="Target: a folder or GGUF file."
)
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    required=True,
    help="A rollout cache, or JSONL that the target answers first.",
)
@click.option("--output", type=click.Path(path_type=Path), required=True, help="Head folder to write.")
@click.option("--init", type=click.Path(path_type=Path), default=None, help="EAGLE-1 head to start from.")
@click.option("--resume", is_flag=True, help="Continue the run in --output.")
@click.option("--checkpoint-seconds", type=float, default=180.0, show_default=True)
@click.option(
    "--answer-tokens", type=int, default=200_000, show_default=True, help="JSONL data: tokens to make."
)
@field_options(TrainConfig)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per step and evaluation.")
def command(
    model: Path, data: Path, output: Path, init: Path | None, resume: bool, checkpoint_seconds: float,
    answer_tokens: int, as_json: bool, **flags: Any,
) -> None:  # fmt: skip
    """Train an EAGLE head for a target on the target's own answers."""
    config = pick(TrainConfig, flags)
    if not resume and (output / STATE_FILE).is_file():
        raise ConfigError(f"{output}: already holds a run; give --resume to continue it, or another folder")
    if data.is_file():
        cache_folder = output / _ROLLOUTS
        if not any(cache_folder.glob("*.safetensors")):
            roll(model, data, cache_folder, answer_tokens, "target", "bf16", RolloutConfig(seed=config.seed))
        data = cache_folder
    trainer = _trainer(open_target(model), data, output, init, config, TrainLog(config.steps, as_json))
    if resume and not trainer.resume():
        raise ConfigError(f"{output / STATE_FILE}: no run to resume")
    acceptance = trainer.train(checkpoint_seconds)
    if acceptance is None:
        echo_status(f"{output}: head written; no greedy held-out rollouts, so acceptance was not measured")
    elif not as_json:
        click.echo(
            f"{output}: head written; best held-out acceptance length {trainer.progress.best:.2f} "
            f"(greedy chain of {len(acceptance.chain)}), last {acceptance.chain_length:.2f}, "
            f"with {acceptance.branch} candidates per node {acceptance.tree_length:.2f}"
        )


def _trainer(
    target: Target, data: Path, output: Path, init: Path | None, config: TrainConfig, log: TrainLog
) -> Trainer:
    dtype = TORCH_DTYPES[config.dtype]
    graph = load_llama(target.config, target.tensor, dtype)
    start = None
    if init is not None:
        head = check_pair(target, open_head(init, target.config))
        if head.config.kind != "eagle1" or head.config.num_hidden_layers != config.layers:
            raise ConfigError(
                f"{init}: --init needs an EAGLE-1 head of {config.layers} layers, this one is "
                f"{head.config.kind} with {head.config.num_hidden_layers}"
            )
        start = load_head(head.config, head.tensor, graph, torch.float32)
    return Trainer(
        graph,
        RolloutCache(data, config.held_out_percent),
        config,
        output,
        log,
        special_ids=tuple(sorted(target_tokenizer(target).special_ids)),
        init=start,
    )
