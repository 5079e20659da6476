"""Tunes an engine: answers prompts, ranks the drafts, measures rounds, chooses a tree per load, tries it out.

Predictions rest on measurements made apart; so every row of the table is run against ``off`` before it is
kept, in turn with it, and a tree that loses there is replaced by ``off``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from speccompile.build.progress import Progress
from speccompile.errors import ConfigError
from speccompile.limits import Limits
from speccompile.runtime.engine import Engine
from speccompile.runtime.params import MAX_SEED, SamplingParams
from speccompile.runtime.session import Session
from speccompile.tree.named import OFF
from speccompile.tree.replay import RankTable, join_tables, replay, walk_full_tree
from speccompile.tree.table import TreeTable
from speccompile.tree.tree import Tree
from speccompile.tune.costs import LoadCosts
from speccompile.tune.probe import Probe
from speccompile.tune.ranks import Ranker, Text
from speccompile.tune.search import Candidate, Choice, candidate_trees, choose, score

_TRIAL_TOKENS = 32
_TRIALS, _TRIAL_REQUESTS = 3, 8  # at least so many trials, and so many answers
_SPARE = 1.2  # how far a tree may keep more tokens somewhere than the full tree does on average
Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """Loads to tune for, and how.  ``max_tokens`` per answer; ``repeats`` of each measured round;
    ``margin``: predicted gain below which a load decodes plainly."""

    batch_sizes: tuple[int, ...] = (1, 2, 4, 8)
    contexts: tuple[int, ...] = (256, 1024)
    max_tokens: int = 96
    temperature: float = 0.0
    repeats: int = 7
    margin: float = 1.03

    def check(self, limits: Limits) -> None:
        """Raise ConfigError for loads that the engine cannot carry."""
        for flag, sizes, most in (
            ("--batch-sizes", self.batch_sizes, limits.max_batch_size),
            ("--contexts", self.contexts, limits.max_seq_len - 2),
        ):
            if not sizes or list(sizes) != sorted(set(sizes)) or not 1 <= sizes[0] <= sizes[-1] <= most:
                wanted = f"ascending numbers from 1 to {most}, the engine's limit"
                raise ConfigError(f"{flag} {','.join(map(str, sizes))}: expected {wanted}")


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The tree of one row, run against ``off`` on several groups of prompts: medians over the groups, of the
    tokens per second of all requests together and of the gain; ``tokens_per_round`` is a mean."""

    batch: int
    context: int
    tree: str
    tokens_per_round: float
    tokens_per_s: float
    off_tokens_per_s: float
    gain: float
    predicted_gain: float


@dataclass(frozen=True, kw_only=True)
class TuneReport:
    """What was found.  ``rounds`` could start at so many positions; ``choices`` [batch][context]."""

    table: TreeTable
    choices: tuple[tuple[Choice, ...], ...]
    trials: tuple[Trial, ...]
    costs: tuple[LoadCosts, ...]
    positions: int


def tune(
    engine: Engine,
    prompts: Prompts,
    config: TuneConfig,
    progress: Progress,
    *,
    ranks: RankTable | None = None,
) -> TuneReport:
    """Tune ``engine``, in which no request may be running.  ``ranks``: instead of those of its answers.

    Prompts that leave no room for a trial are left out.  Raises ConfigError for an engine without a head,
    for loads beyond its limits, and when no prompt is left.
    """
    limits = engine.programs.limits
    if not engine.programs.has_head:
        raise ConfigError(f"{engine.path}: has no draft head, so there is no tree to tune")
    config.check(limits)
    fitting = [prompt for prompt in prompts if len(prompt) + 2 * _TRIAL_TOKENS <= limits.max_seq_len]
    if not fitting:
        raise ConfigError(f"--prompts: none leaves {2 * _TRIAL_TOKENS} tokens of {limits.max_seq_len} free")
    if ranks is None:
        with progress.stage("ranks", f"answer {len(fitting)} prompts and rank the drafts along them"):
            ranks = measure_ranks(engine, fitting, config, progress)
    if not len(ranks):
        raise ConfigError("--prompts: every answer ends with its first token, so nothing can be drafted")
    with progress.stage("trees", f"find trees for {len(ranks)} round starts"):
        nodes, depth = limits.rows_per_request - 1, limits.max_tree_depth
        trees = candidate_trees(ranks, max_nodes=nodes, max_depth=depth)
        candidates = score(ranks, trees, config.contexts)
    with progress.stage("costs", "measure rounds"):
        most = replay(ranks, walk_full_tree(ranks, limits.draft_topk)).acceptance_length
        probe = Probe(engine.programs, engine.kv, temperature=config.temperature)
        loads = [(batch, context) for batch in config.batch_sizes for context in config.contexts]
        costs = probe.measure(loads, repeats=config.repeats, worth=_SPARE * most)
    choices = _choose_all(candidates, costs, config)
    with progress.stage("trials", "run the chosen trees against off"):
        trials = [_try_row(engine, fitting, row, config) for row in progress.bar(choices, "batch")]
    choices = [_without_losers(row, trial) for row, trial in zip(choices, trials, strict=True)]
    return TuneReport(
        table=TreeTable(
            config.batch_sizes, config.contexts, tuple(tuple(c.tree for c in row) for row in choices)
        ),
        choices=tuple(map(tuple, choices)),
        trials=tuple(trials),
        costs=tuple(costs),
        positions=len(ranks),
    )


def measure_ranks(engine: Engine, prompts: Prompts, config: TuneConfig, progress: Progress) -> RankTable:
    """Ranks along the engine's own answers to ``prompts``."""
    params = [
        SamplingParams(max_tokens=config.max_tokens, temperature=config.temperature, seed=seed)
        for seed in range(len(prompts))
    ]
    answers = engine.generate([list(prompt) for prompt in prompts], params)
    depth = engine.programs.limits.max_tree_depth
    ranker = Ranker(engine.programs, engine.kv, depth=depth)
    texts = [
        Text(
            tokens=[*prompt, *answer.token_ids],
            first=len(prompt),
            temperature=config.temperature,
            seed=answer.seed,
        )
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    return join_tables([ranker.rank(text) for text in progress.bar(texts, "text")], depth)


def _choose_all(
    candidates: Sequence[Candidate], costs: Sequence[LoadCosts], config: TuneConfig
) -> list[list[Choice]]:
    width = len(config.contexts)
    found = [choose(candidates, load, i % width, margin=config.margin) for i, load in enumerate(costs)]
    return [found[start : start + width] for start in range(0, len(found), width)]


def _try_row(engine: Engine, prompts: Prompts, row: Sequence[Choice], config: TuneConfig) -> Trial:
    """Run the tree of the cell that the prompts' mean length falls into, on different prompts in turn."""
    batch = row[0].batch
    mean = sum(map(len, prompts)) / len(prompts) + _TRIAL_TOKENS / 2
    choice = next((c for c in row if mean <= c.context), row[-1])
    pairs = []
    for number in range(max(_TRIALS, _TRIAL_REQUESTS // batch) if choice.tree.num_nodes else 1):
        chosen = [prompts[(number * batch + i) % len(prompts)] for i in range(batch)]
        pairs.append([_decode(engine.session, chosen, tree, config) for tree in (OFF, choice.tree)])
    gain = statistics.median(tree.tokens_per_s / off.tokens_per_s for off, tree in pairs)
    return Trial(
        batch=batch,
        context=choice.context,
        tree=choice.tree.name,
        tokens_per_round=statistics.mean(tree.tokens_per_round for _, tree in pairs),
        tokens_per_s=statistics.median(tree.tokens_per_s for _, tree in pairs),
        off_tokens_per_s=statistics.median(off.tokens_per_s for off, _ in pairs),
        gain=gain if choice.tree.num_nodes else 1.0,
        predicted_gain=choice.gain,
    )


@dataclass(frozen=True)
class _Speed:
    tokens_per_s: float
    tokens_per_round: float


def _decode(session: Session, prompts: Prompts, tree: Tree, config: TuneConfig) -> _Speed:
    """Decode all prompts together, timed from the last first token until one has enough tokens more."""
    requests = [
        session.submit(
            list(prompt),
            SamplingParams(
                max_tokens=MAX_SEED,  # as many as fit
                temperature=config.temperature,
                seed=seed,
                ignore_eos=True,
                speculation=tree,
            ),
        )
        for seed, prompt in enumerate(prompts)
    ]
    while not all(request.output.token_ids for request in requests):
        session.step()
    first = [len(request.output.token_ids) for request in requests]
    tokens, rounds = session.stats.counts.tokens, session.stats.counts.rounds
    began = time.perf_counter()
    while not any(
        request.done or len(request.output.token_ids) >= begin + _TRIAL_TOKENS
        for request, begin in zip(requests, first, strict=True)
    ):
        session.step()
    seconds = time.perf_counter() - began
    for request in requests:
        session.cancel(request)
    tokens, rounds = session.stats.counts.tokens - tokens, session.stats.counts.rounds - rounds
    if not rounds:
        raise ConfigError("--prompts: too long; the first answer ended before the last prompt was read")
    return _Speed(tokens / seconds, tokens / rounds)


def _without_losers(row: Sequence[Choice], trial: Trial) -> list[Choice]:
    """``off`` in the place of the tree that lost, and of all of the row that promised no more than it."""
    if trial.gain >= 1.0:
        return list(row)
    return [
        replace(
            choice, tree=OFF, tokens_per_round=1.0, round_s=choice.batch / choice.off_tokens_per_s,
            tokens_per_s=choice.off_tokens_per_s,
        )
        if choice.gain <= trial.predicted_gain
        else choice
        for choice in row
    ]  # fmt: skip
