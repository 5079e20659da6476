"""``speccompile eval-draft``: acceptance of a head on the target's greedy rollouts, by depth."""

from __future__ import annotations

from pathlib import Path

import click
import torch

from speccompile.build.config import TORCH_DTYPES
from speccompile.checkpoint.heads import open_head
from speccompile.checkpoint.pair import check_pair
from speccompile.checkpoint.target import open_target
from speccompile.cli.show import echo_json, table
from speccompile.errors import ConfigError
from speccompile.model.load import draft_token_ids, load_head, load_llama
from speccompile.train.batches import load_batch, plan_epoch, supervision
from speccompile.train.cache import RolloutCache
from speccompile.train.evaluate import Acceptance, greedy_rows, measure_acceptance

_BATCH_TOKENS, _MAX_LENGTH = 1024, 4096


@click.command("eval-draft")
@click.option("--model", type=click.Path(path_type=Path), required=True, help="Target: folder or GGUF file.")
@click.option("--draft", type=click.Path(path_type=Path), required=True, help="EAGLE-1 head folder.")
@click.option(
    "--data", type=click.Path(path_type=Path), required=True, help="Cache of `speccompile rollout`."
)
@click.option("--depth", type=click.IntRange(1), default=4, show_default=True, help="Draft steps measured.")
@click.option("--branch", type=click.IntRange(1), default=3, show_default=True, help="Candidates per node.")
@click.option(
    "--held-out-percent", type=click.IntRange(0, 100), default=None, help="Only a run's held-out part."
)
@click.option("--dtype", type=click.Choice(list(TORCH_DTYPES)), default="bf16", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    model: Path,
    draft: Path,
    data: Path,
    depth: int,
    branch: int,
    held_out_percent: int | None,
    dtype: str,
    as_json: bool,
) -> None:
    """Estimate a head's acceptance on greedy rollouts, without building an engine."""
    result = measure(model, draft, data, depth, branch, held_out_percent, TORCH_DTYPES[dtype])
    if as_json:
        echo_json(
            {
                "rounds": result.rounds,
                "branch": branch,
                "chain": result.chain,
                "chain_length": result.chain_length,
                "tree": result.tree,
                "tree_length": result.tree_length,
            }
        )
        return
    rows = [["depth", "chain", f"tree of {branch} per node"]]
    rows += [
        [str(d), f"{c:.3f}", f"{t:.3f}"]
        for d, (c, t) in enumerate(zip(result.chain, result.tree, strict=True), 1)
    ]
    rows.append(["length", f"{result.chain_length:.2f}", f"{result.tree_length:.2f}"])
    click.echo(table(rows))
    click.echo(f"{result.rounds} rounds; length = accepted + bonus tokens per target call")


def measure(
    model: Path,
    draft: Path,
    data: Path,
    depth: int,
    branch: int,
    held_out_percent: int | None,
    dtype: torch.dtype,
) -> Acceptance:
    """The work of the command; raises ConfigError when nothing can be measured."""
    target = open_target(model)
    graph = load_llama(target.config, target.tensor, dtype)
    head = check_pair(target, open_head(draft, target.config))
    if head.config.kind != "eagle1":
        raise ConfigError(f"{draft}: only EAGLE-1 heads can be measured on these rollouts")
    cache = RolloutCache(data, held_out_percent or 0)
    refs = [r for r in cache.refs if r.held_out or held_out_percent is None]
    eos_ids = torch.tensor(target.config.eos_token_ids)
    batches = (
        load_batch(cache, part, _MAX_LENGTH, "hidden", lambda i, a: supervision(i, a, eos_ids, False))
        for part in plan_epoch(refs, _BATCH_TOKENS, _MAX_LENGTH, 0)
    )
    greedy = (greedy_rows(batch, graph.lm_head) for batch in batches)
    result = measure_acceptance(
        load_head(head.config, head.tensor, graph, dtype),
        draft_token_ids(head.config, head.tensor),
        (batch for batch in greedy if batch is not None),
        depth,
        branch,
    )
    if not result.rounds:
        raise ConfigError(
            f"{data}: no greedy answers longer than {depth} tokens; roll out with --temperatures 0"
        )
    return result
