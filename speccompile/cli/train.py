"""``speccompile train``: an EAGLE head by online distillation, from prompts or from a rollout cache.

``torchrun --nproc-per-node 2 -m speccompile train ...`` trains with several processes.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import click
import torch

from speccompile.build.config import TORCH_DTYPES
from speccompile.checkpoint.heads import open_head
from speccompile.checkpoint.pair import check_pair
from speccompile.checkpoint.target import Target, open_target
from speccompile.cli.field_options import field_options, pick
from speccompile.cli.rollout import RolloutConfig, roll
from speccompile.cli.show import echo_status
from speccompile.cli.train_log import TrainLog
from speccompile.errors import ConfigError
from speccompile.model.llama import Llama
from speccompile.model.load import draft_token_ids, load_head, load_llama
from speccompile.train.cache import RolloutCache
from speccompile.train.checkpoint import STATE_FILE
from speccompile.train.config import TrainConfig
from speccompile.train.distributed import Ranks
from speccompile.train.evaluate import Acceptance
from speccompile.train.export import DEFAULT_FORMAT, FORMATS
from speccompile.train.feature_cache import FeatureCache
from speccompile.train.initial import WarmStart
from speccompile.train.tokenizing import target_tokenizer
from speccompile.train.trainer import Trainer

_ROLLOUTS, _ROLLED = "rollouts", "made-from.txt"
_GIB = 2**30


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
@click.option(
    "--init", type=click.Path(path_type=Path), default=None,
    help="Head of the same kind to start from; more --layers start fresh, the draft vocabulary may differ.",
)  # fmt: skip
@click.option("--resume", is_flag=True, help="Continue the run in --output.")
@click.option("--checkpoint-seconds", type=float, default=180.0, show_default=True)
@click.option(
    "--answer-tokens",
    type=click.IntRange(1),
    default=200_000,
    show_default=True,
    help="JSONL data: tokens to make.",
)
@click.option(
    "--format", "format_name", type=click.Choice(list(FORMATS)), default=DEFAULT_FORMAT, show_default=True,
    help="Layout of the head folder.",
)  # fmt: skip
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True,
    help="Where target and head run; auto takes CUDA when there is a device.",
)  # fmt: skip
@click.option(
    "--feature-cache", type=click.Path(path_type=Path), default=None,
    help="Folder that keeps target features computed in the loop.",
)  # fmt: skip
@click.option("--feature-cache-gib", type=float, default=20.0, show_default=True, help="Its largest size.")
@field_options(TrainConfig)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per step and evaluation.")
def command(
    model: Path, data: Path, output: Path, init: Path | None, resume: bool, checkpoint_seconds: float,
    answer_tokens: int, format_name: str, device: str, feature_cache: Path | None, feature_cache_gib: float,
    as_json: bool, **flags: Any,
) -> None:  # fmt: skip
    """Train an EAGLE head for a target on the target's own answers."""
    config = pick(TrainConfig, flags)
    if config.kind not in FORMATS[format_name][0]:
        raise ConfigError(f"--format {format_name}: holds EAGLE-3 heads only; use --format {DEFAULT_FORMAT}")
    if not resume:
        _check_output(output)
    place = _device(device)
    ranks = Ranks.join(place)
    try:
        ranks.check_accumulate(config.accumulate)
        if data.is_file():
            data = _rolled(model, data, output / _ROLLOUTS, answer_tokens, config, ranks)
        target = open_target(model)
        graph = load_llama(target.config, target.tensor, TORCH_DTYPES[config.dtype]).to(place)
        trainer = Trainer(
            graph,
            RolloutCache(data, config.held_out_percent),
            config,
            output,
            TrainLog(config.steps, as_json) if ranks.leads else _silent,
            special_ids=tuple(sorted(target_tokenizer(target).special_ids)),
            init=None if init is None else _warm_start(init, target, graph),
            format_name=format_name,
            feature_cache=_feature_cache(feature_cache, feature_cache_gib),
            ranks=ranks,
        )
        if resume and not trainer.resume():
            raise ConfigError(f"{output / STATE_FILE}: no checkpoint to resume; start without --resume")
        if trainer.progress.step >= config.steps:
            echo_status(f"{output}: already finished; nothing is left to do")
            return
        acceptance = trainer.train(checkpoint_seconds)
        if ranks.leads:
            _report(output, trainer, acceptance, as_json)
    finally:
        ranks.leave()


def _check_output(output: Path) -> None:
    """ConfigError when the run would write over a run, a head, a target or a rollout cache."""
    if output.exists() and not output.is_dir():
        raise ConfigError(f"{output}: is a file; --output is a folder")
    if (output / STATE_FILE).is_file():
        raise ConfigError(f"{output}: already holds a run; give --resume to continue it, or another folder")
    taken = [*output.glob("config.json"), *output.glob("*.safetensors"), *output.glob("*.bin")]
    if taken:
        raise ConfigError(f"{taken[0]}: a run in {output} would write over it; give an empty --output folder")


def _device(name: str) -> torch.device:
    """The device of this process; under torchrun, CUDA devices are dealt out by local rank."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: this machine or this build of PyTorch has no CUDA device; use cpu")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    place = torch.device("cuda", Ranks.local_rank())
    torch.cuda.set_device(place)
    return place


def _rolled(
    model: Path, prompts: Path, cache_folder: Path, answer_tokens: int, config: TrainConfig, ranks: Ranks
) -> Path:
    """The target's answers to ``prompts``, made by process 0 unless the same ones are there."""
    if ranks.leads:
        done, wanted = cache_folder / _ROLLED, _roll_key(prompts, answer_tokens, config)
        if not any(cache_folder.glob("*.safetensors")):
            rollouts = RolloutConfig(seed=config.seed)
            roll(model, prompts, cache_folder, answer_tokens, "target", "bf16", rollouts)
            done.write_text(wanted, encoding="utf-8")
        elif not done.is_file() or done.read_text(encoding="utf-8") != wanted:
            raise ConfigError(
                f"{cache_folder}: holds rollouts that were cut short, or of other prompts, tokens or seed; "
                f"delete it, or give it as --data to train on it"
            )
    ranks.wait()
    return cache_folder


def _roll_key(prompts: Path, answer_tokens: int, config: TrainConfig) -> str:
    """What the rollouts of a run depend on."""
    digest = hashlib.sha256(prompts.read_bytes()).hexdigest()
    return f"{digest} {answer_tokens} tokens, seed {config.seed}\n"


def _warm_start(path: Path, target: Target, graph: Llama) -> WarmStart:
    head = check_pair(target, open_head(path, target.config))
    loaded = load_head(head.config, head.tensor, graph, torch.float32)
    return WarmStart(loaded, draft_token_ids(head.config, head.tensor))


def _feature_cache(folder: Path | None, gib: float) -> FeatureCache | None:
    if not 0 < gib < math.inf:
        raise ConfigError(f"--feature-cache-gib {gib}: must be a positive number")
    return None if folder is None else FeatureCache(folder, int(gib * _GIB))


def _silent(_record: dict[str, Any]) -> None:
    """The log of processes other than the first."""


def _report(output: Path, trainer: Trainer, acceptance: Acceptance | None, as_json: bool) -> None:
    if acceptance is None:
        echo_status(f"{output}: head written; no greedy held-out rollouts, so acceptance was not measured")
    elif not as_json:
        click.echo(
            f"{output}: head written; best held-out acceptance length {trainer.progress.best:.2f} "
            f"(greedy chain of {len(acceptance.chain)}), last {acceptance.chain_length:.2f}, "
            f"with {acceptance.branch} candidates per node {acceptance.tree_length:.2f}"
        )
