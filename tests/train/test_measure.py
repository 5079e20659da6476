"""Ranks of rollout caches: groups by temperature, which texts count, and both kinds of heads."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file, save_file

from speccompile.checkpoint.config import HeadConfig
from speccompile.model.eagle import EagleHead
from speccompile.train.cache import RolloutCache
from speccompile.train.evaluate import CONTEXT_EDGES, context_name, rank_shares, tree_result
from speccompile.train.features import FeatureSource
from speccompile.train.measure import RankConfig, collect_ranks
from speccompile.tree.named import chain
from speccompile.tree.replay import NOT_DRAFTED, RankTable, replay, walk_full_tree
from tests.train.test_loss import live_head
from tests.train.tiny import fill_cache, tiny_target

X = NOT_DRAFTED
CONFIG = RankConfig(depth=3, width=8)


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    target, folder = tiny_target(), tmp_path_factory.mktemp("cache")
    fill_cache(folder, target, batches=3)
    return target, folder, *live_head(target)


def collect(setting, config=CONFIG, target=None, **changes):
    own, folder, head, ids = setting
    cache = RolloutCache(folder, 0)
    refs = [dataclasses.replace(ref, **changes) for ref in cache.refs]
    return collect_ranks("d", FeatureSource(target or own, cache), refs, head, ids, config)


def test_groups_are_the_temperatures_and_every_rollout_counts(setting):
    groups, left_out = collect(setting)
    assert [g.temperature for g in groups] == [0.0, 1.0, 2.0] and left_out == 0
    assert sum(g.texts for g in groups) == 24
    assert all(len(g.table) > g.texts for g in groups)
    assert {g.temperature for g in collect(setting, dataclasses.replace(CONFIG, greedy=False))[0]} == {
        1.0,
        2.0,
    }
    assert {g.temperature for g in collect(setting, dataclasses.replace(CONFIG, sampled=False))[0]} == {0.0}


def test_texts_without_a_law_count_when_they_are_greedy(setting):
    greedy = next(g.texts for g in collect(setting)[0] if not g.temperature)
    groups, left_out = collect(setting, temperature=None, seed=None)
    assert [(g.temperature, g.texts) for g in groups] == [(0.0, greedy)]
    assert left_out == 24 - greedy


def test_texts_of_another_seed_or_target_are_left_out(setting):
    groups, left_out = collect(setting, seed=12345)
    assert [g.temperature for g in groups] == [0.0] and left_out == 24 - groups[0].texts
    assert collect(setting, seed=None)[1] == left_out
    groups, left_out = collect(setting, target=tiny_target(seed=7))
    assert not groups and left_out == 24


def test_features_in_the_shard_or_from_the_target_give_the_same_ranks(setting, tmp_path):
    """Also for an EAGLE-3 head, whose aux features these shards do not hold."""
    target, folder, _, ids = setting
    for path in folder.glob("*.safetensors"):
        tensors = {k: v for k, v in load_file(path).items() if k not in ("hidden", "aux")}
        save_file(tensors, tmp_path / path.name)
    bare = (target, tmp_path, *setting[2:])
    stored = {g.temperature: g.table.rank for g in collect(setting)[0]}
    online = {g.temperature: g.table.rank for g in collect(bare)[0]}
    assert all((stored[t] == online[t]).all() for t in stored)
    head = eagle3_head(target, len(ids))
    cache = RolloutCache(tmp_path, 0)
    source = FeatureSource(target, cache, head.config.aux_layers)
    groups, left_out = collect_ranks("d", source, cache.refs, head, ids, CONFIG)
    assert left_out == 0 and any((g.table.rank != NOT_DRAFTED).any() for g in groups)


def eagle3_head(target, draft_vocab) -> EagleHead:
    c = target.config
    config = HeadConfig(
        kind="eagle3", num_hidden_layers=1, hidden_size=c.hidden_size, target_hidden_size=c.hidden_size,
        intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8, rms_norm_eps=1e-5,
        rope=c.rope, vocab_size=c.vocab_size, draft_vocab_size=draft_vocab, aux_layers=(0, 1, 2),
    )  # fmt: skip
    torch.manual_seed(1)
    return EagleHead(config).eval()


def test_max_texts_takes_some_of_all(setting):
    groups, left_out = collect(setting, dataclasses.replace(CONFIG, max_texts=6))
    assert 4 <= sum(g.texts for g in groups) + left_out <= 6


def table(rank, position) -> RankTable:
    count = len(rank)
    left = torch.arange(count, 0, -1).int().numpy()
    return RankTable(
        torch.tensor(rank, dtype=torch.uint8).numpy(), left, torch.tensor(position).int().numpy()
    )


def test_buckets_hold_the_rounds_that_start_in_them():
    t = table([[0, X], [0, X], [1, X], [X, X]], [254, 255, 256, 2048])
    result = tree_result(t, chain(1))
    assert result.rounds == 3, "rows 0, 2 and 3"
    assert result.context_rounds == (1, 1, 0, 0, 1)
    assert result.context_length == (2.0, 1.0, 0.0, 0.0, 1.0)
    assert [context_name(b) for b in range(len(CONTEXT_EDGES))][::4] == ["0-255", "2048+"]


def test_rank_shares_of_all_rounds_and_of_accepted_parents():
    t = table([[0, 1], [0, 0], [0, 0], [1, X], [2, 0], [X, X], [X, X]], list(range(7)))
    rounds = replay(t, walk_full_tree(t, 2))
    assert rounds.row.tolist() == [0, 3, 5, 6] and rounds.accepted.tolist() == [2, 1, 0, 0]
    shares = rank_shares(t, 2)
    assert shares.marginal == ((0.25, 0.25), (0.0, 0.25))
    assert shares.conditional == ((0.25, 0.25), (0.0, 0.5))
    chained = tree_result(t, chain(2))
    assert chained.rounds == 4, "rows 0, 2, 5 and 6"
    assert chained.reached == (0.5, 0.25)
