"""``speccompile eval-draft``: what a head accepts on its target's texts, for any tree, without an engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from speccompile.build.config import TORCH_DTYPES
from speccompile.checkpoint.heads import open_head
from speccompile.checkpoint.pair import check_pair
from speccompile.checkpoint.target import open_target
from speccompile.cli.eval_tables import all_tables
from speccompile.cli.show import echo_json, echo_status
from speccompile.errors import ConfigError, SpeccompileError
from speccompile.model.load import draft_token_ids, load_head, load_llama
from speccompile.train.cache import RolloutCache, SequenceRef
from speccompile.train.evaluate import CONTEXT_EDGES
from speccompile.train.features import FeatureSource
from speccompile.train.files import write_atomically
from speccompile.train.measure import GroupReport, RankConfig, TextGroup, collect_ranks, report_group
from speccompile.tree.named import chain, resolve_tree
from speccompile.tree.replay import NOT_DRAFTED, join_tables
from speccompile.tree.search import best_tree
from speccompile.tree.tree import Tree


@click.command("eval-draft")
@click.option("--model", type=click.Path(path_type=Path), required=True, help="Target: folder or GGUF file.")
@click.option("--draft", type=click.Path(path_type=Path), required=True, help="Head: EAGLE-1 or EAGLE-3.")
@click.option(
    "--data",
    multiple=True,
    required=True,
    metavar="[NAME=]CACHE",
    help="Cache of `speccompile rollout`; repeat to compare data sets.",
)
@click.option("--depth", type=click.IntRange(1), default=6, show_default=True, help="Longest chain.")
@click.option(
    "--branch", type=click.IntRange(1, NOT_DRAFTED - 1), default=3, show_default=True, help="Ranks listed."
)
@click.option("--tree", multiple=True, help="Also this tree: a name, a file, or a list of rank paths.")
@click.option(
    "--best-nodes",
    type=click.IntRange(1, NOT_DRAFTED - 1),
    default=None,
    help="Also find the best tree of at most this many drafts (the root is not one), no deeper than "
    "--depth and the deepest --tree, on all data together.",
)
@click.option(
    "--write-tree",
    type=click.Path(path_type=Path, dir_okay=False),
    default=None,
    help="Store the best tree, for `build --tree FILE`.",
)
@click.option(
    "--sampling",
    type=click.Choice(["all", "greedy", "sampled"]),
    default="all",
    show_default=True,
    help="Texts to use; those sampled at one temperature are reported together.",
)
@click.option("--max-texts", type=click.IntRange(0), default=0, show_default=True, help="Per cache; 0: all.")
@click.option(
    "--held-out-percent", type=click.IntRange(0, 100), default=None, help="Only a run's held-out part."
)
@click.option("--dtype", type=click.Choice(list(TORCH_DTYPES)), default="bf16", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--plot", type=click.Path(path_type=Path, dir_okay=False), default=None, help="Also draw this PNG."
)
def command(
    model: Path, draft: Path, data: tuple[str, ...], depth: int, branch: int, tree: tuple[str, ...],
    best_nodes: int | None, write_tree: Path | None, sampling: str, max_texts: int,
    held_out_percent: int | None, dtype: str, as_json: bool, plot: Path | None,
) -> None:  # fmt: skip
    """Estimate what an engine would accept, from the target's own texts (`speccompile rollout`)."""
    if write_tree is not None and best_nodes is None:
        raise ConfigError("--write-tree stores the best tree; give --best-nodes too")
    draw = _plotter() if plot is not None else None
    trees = [*map(chain, range(1, depth + 1)), *map(resolve_tree, tree)]
    config = RankConfig(
        depth=max(t.depth for t in trees),
        width=max(branch, best_nodes or 0, *(t.max_rank + 1 for t in trees)),
        max_texts=max_texts,
        greedy=sampling != "sampled",
        sampled=sampling != "greedy",
    )
    groups = _collect(model, draft, _caches(data, held_out_percent), dtype, config)
    if best_nodes is not None:
        trees.append(best_tree(join_tables([g.table for g in groups], config.depth), best_nodes))
    if write_tree is not None:
        text = json.dumps(trees[-1].to_json()) + "\n"
        write_atomically(write_tree, lambda file: file.write(text.encode()))
    reports = [report_group(group, trees, branch) for group in groups]
    _show(reports, trees, as_json)
    if draw is not None and plot is not None:
        draw(reports, plot)
        echo_status(f"{plot}: written")


def _caches(
    data: Sequence[str], held_out_percent: int | None
) -> dict[str, tuple[RolloutCache, list[SequenceRef]]]:
    """By name: the cache and the sequences to use.  The name is the folder's unless given."""
    caches = {}
    for item in data:
        name, _, folder = item.rpartition("=")
        path = Path(folder)
        name = name or path.name
        if name in caches:
            raise ConfigError(
                f"--data {item}: {name!r} is given twice; name one of them, as in NAME={folder}"
            )
        cache = RolloutCache(path, held_out_percent or 0)
        caches[name] = cache, [r for r in cache.refs if r.held_out or held_out_percent is None]
    return caches


def _collect(
    model: Path,
    draft: Path,
    caches: dict[str, tuple[RolloutCache, list[SequenceRef]]],
    dtype: str,
    config: RankConfig,
) -> list[TextGroup]:
    target = open_target(model)
    graph = load_llama(target.config, target.tensor, TORCH_DTYPES[dtype])
    found = check_pair(target, open_head(draft, target.config))
    head = load_head(found.config, found.tensor, graph, TORCH_DTYPES[dtype])
    token_ids = draft_token_ids(found.config, found.tensor)
    groups: list[TextGroup] = []
    for name, (cache, refs) in caches.items():
        source = FeatureSource(graph, cache, found.config.aux_layers)

        def bar(parts: Iterable[Any], name: str = name) -> Iterable[Any]:
            return tqdm(parts, desc=name, unit="batch", disable=None)

        new, left_out = collect_ranks(name, source, refs, head, token_ids, config, bar)
        if left_out:
            echo_status(
                f"{name}: {left_out} texts left out; the target draws them neither greedily nor by their seed"
            )
        groups += [group for group in new if len(group.table)]
    if not groups:
        raise ConfigError(
            f"--data: no answer in {', '.join(map(str, caches))} can be replayed; "
            "use rollouts of this target, greedy or with recorded seeds"
        )
    return groups


def _show(reports: Sequence[GroupReport], trees: Sequence[Tree], as_json: bool) -> None:
    if as_json:
        rows = [{"law": report.law, **asdict(report)} for report in reports]
        shapes = [tree.to_json() for tree in trees]
        echo_json({"context_edges": CONTEXT_EDGES, "trees": shapes, "groups": rows})
    else:
        click.echo(all_tables(reports))


def _plotter() -> Callable[[Sequence[GroupReport], Path], None]:
    """Fails before the work starts when the plotting library is missing."""
    try:
        from speccompile.train.plot_acceptance import plot_acceptance
    except ModuleNotFoundError as error:
        raise SpeccompileError(
            f"--plot: the Python module {error.name!r} is not installed; pip install 'speccompile[plot]'"
        ) from error
    return plot_acceptance
