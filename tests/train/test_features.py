"""Features of a batch: from shards that belong to the target, else computed by the target itself."""

import dataclasses
import errno
from pathlib import Path

import pytest
import torch

from speccompile.train.cache import CacheError, Rollout, RolloutCache, write_shard
from speccompile.train.feature_cache import FeatureCache, TextFeatures, feature_key
from speccompile.train.features import FeatureSource, run_target, target_digest
from tests.model.dense import dense_causal_attend
from tests.train.tiny import EOS, tiny_target

TEXTS = [[5, 6, 7, 30, 31, EOS], [8, 9, 10, 11, 50, 51, 52, 53, EOS], [12, 13, 70, EOS]]
AUX = (0, 2)


def supervise(_ids, answer):
    return answer


def truth(target, ids, aux_layers=()):
    return target(ids, torch.arange(len(ids)), dense_causal_attend, aux_layers)


def shard(folder, name="s0-0000", *, features=None, metadata=None):
    """``features(ids)`` gives what is stored: (hidden, aux or None)."""
    rows = []
    for text in TEXTS:
        ids, answer = torch.tensor(text), torch.arange(len(text)) >= 3
        rows.append(Rollout(ids, answer, *(features(ids[:-1]) if features else ())))
    write_shard(folder, name, rows, metadata or {})
    return RolloutCache(folder, 0)


def wrong(ids):
    """Features that nobody can have computed."""
    return torch.full((len(ids), 32), 7.0), torch.full((len(ids), 64), 8.0)


def check(batch, target, aux_layers, max_length=99):
    for b, text in enumerate(TEXTS):
        ids = torch.tensor(text)[: max_length + 1]
        n = len(ids) - 1
        hidden, feature = truth(target, ids[:-1], aux_layers)
        assert batch.length[b] == n
        assert torch.equal(batch.token[b, : n + 1], ids)
        assert batch.supervised[b].tolist() == [3 <= i <= n for i in range(batch.supervised.shape[1])]
        torch.testing.assert_close(batch.hidden[b, :n], hidden, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(batch.feature[b, :n], feature, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("aux_layers", [(), AUX])
@pytest.mark.parametrize("max_length", [99, 4])
def test_features_are_computed_where_none_are_stored(tmp_path, aux_layers, max_length):
    target = tiny_target()
    cache = shard(tmp_path)
    batch = FeatureSource(target, cache, aux_layers).batch(cache.refs, max_length, supervise)
    check(batch, target, aux_layers, max_length)


def test_stored_features_are_read_when_they_belong_to_target_and_layers(tmp_path):
    target = tiny_target()
    notes = {"target": target_digest(target), "aux_layers": "0,2"}
    cache = shard(tmp_path, features=wrong, metadata=notes)
    stored = FeatureSource(target, cache, AUX).batch(cache.refs, 99, supervise)
    assert stored.hidden[0, 0, 0] == 7
    assert stored.feature[0, 0, 0] == 8
    assert FeatureSource(target, cache).batch(cache.refs, 99, supervise).feature[0, 0, 0] == 7
    check(FeatureSource(target, cache, (1, 2)).batch(cache.refs, 99, supervise), target, (1, 2))
    other = tiny_target(seed=5)
    check(FeatureSource(other, cache, AUX).batch(cache.refs, 99, supervise), other, AUX)


def test_stored_and_computed_features_mix_in_one_batch(tmp_path):
    target = tiny_target()
    notes = {"target": target_digest(target)}
    shard(tmp_path, "a", features=lambda ids: (truth(target, ids)[0].bfloat16(),), metadata=notes)
    cache = shard(tmp_path, "b")
    batch = FeatureSource(target, cache).batch(cache.refs, 99, supervise)
    assert batch.hidden.dtype == torch.float32
    torch.testing.assert_close(batch.hidden[:3], batch.hidden[3:], rtol=2e-2, atol=2e-2)
    assert not torch.equal(batch.hidden[:3], batch.hidden[3:])


def test_shards_without_a_note_are_of_unknown_target(tmp_path):
    """They are read as they are; another width shows that they are wrong; aux layers are the usual ones."""
    target = tiny_target()
    cache = shard(tmp_path, features=wrong)
    assert FeatureSource(target, cache).batch(cache.refs, 99, supervise).hidden[0, 0, 0] == 7
    check(FeatureSource(target, cache, AUX).batch(cache.refs, 99, supervise), target, AUX)
    with pytest.raises(CacheError, match="features are 32 wide, its are 40"):
        FeatureSource(tiny_target(hidden=40), cache).batch(cache.refs, 99, supervise)


def test_ids_outside_the_vocabulary_name_the_shard(tmp_path):
    write_shard(tmp_path, "s0", [Rollout(torch.tensor([5, 6, 900]), torch.ones(3).bool())], {})
    cache = RolloutCache(tmp_path, 0)
    with pytest.raises(CacheError, match=r"s0.*wrong target: id 900"):
        FeatureSource(tiny_target(), cache).batch(cache.refs, 99, supervise)


def test_the_digest_tells_targets_apart_and_not_dtypes():
    target = tiny_target()
    assert target_digest(target) == target_digest(tiny_target())
    assert target_digest(target) != target_digest(tiny_target(seed=1))
    half = tiny_target().bfloat16()
    assert target_digest(half) == target_digest(target)
    other = tiny_target()
    other.config = dataclasses.replace(other.config, rms_norm_eps=1e-6)
    assert target_digest(other) != target_digest(target)


def counted(monkeypatch):
    texts = []

    def run(target, ids, aux_layers):
        texts.extend(ids)
        return run_target(target, ids, aux_layers)

    monkeypatch.setattr("speccompile.train.features.run_target", run)
    return texts


def test_computed_features_are_kept_on_disk_by_content(tmp_path, monkeypatch):
    target, texts = tiny_target(), counted(monkeypatch)
    cache = shard(tmp_path / "data")

    def batch(target=target, aux_layers=AUX, max_length=99):
        store = FeatureCache(tmp_path / "features", 10**6)
        return FeatureSource(target, cache, aux_layers, store).batch(cache.refs, max_length, supervise)

    first = batch()
    assert len(texts) == 3
    again = batch()
    assert len(texts) == 3, "everything was on disk"
    assert torch.equal(first.hidden, again.hidden)
    assert torch.equal(first.feature, again.feature)
    batch(aux_layers=(1, 2))
    batch(target=tiny_target(seed=4))
    batch(max_length=2)
    assert len(texts) == 12, "other layers, targets and texts are other entries"


@pytest.mark.parametrize("damage", [lambda b: b[:-9], lambda b: b[:-9] + b"\x55" * 9, lambda _b: b""])
def test_a_damaged_entry_is_dropped_and_computed_again(tmp_path, monkeypatch, damage):
    target, texts = tiny_target(), counted(monkeypatch)
    cache = shard(tmp_path / "data")
    source = FeatureSource(target, cache, (), FeatureCache(tmp_path / "features", 10**6))
    first = source.batch(cache.refs, 99, supervise)
    entry = sorted((tmp_path / "features").glob("*/*"))[0]
    entry.write_bytes(damage(entry.read_bytes()))
    with pytest.warns(UserWarning, match=f"{entry.name}: damaged feature entry"):
        again = source.batch(cache.refs, 99, supervise)
    assert len(texts) == 4
    torch.testing.assert_close(first.hidden, again.hidden, rtol=1e-4, atol=1e-4)
    source.batch(cache.refs, 99, supervise)
    assert len(texts) == 4, "the entry is whole again"


def entry(rows=10):
    return TextFeatures(torch.randn(rows, 32), torch.randn(rows, 0))


def test_the_folder_stays_within_its_bound(tmp_path):
    store = FeatureCache(tmp_path, 4000)
    for i in range(8):
        store.put(f"{i:064x}", entry())
    sizes = [p.stat().st_size for p in tmp_path.glob("*/*")]
    assert len(sizes) == 2
    assert sum(sizes) == store.used_bytes <= 4000
    assert FeatureCache(tmp_path, 4000).used_bytes == store.used_bytes
    assert store.get(f"{0:064x}") is not None, "what came first stays"
    assert store.get(f"{7:064x}") is None


def test_a_full_disk_stops_storing_and_nothing_else(tmp_path, monkeypatch):
    store = FeatureCache(tmp_path, 10**6)
    store.put("a" * 64, entry())

    def full(self, _data):
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.warns(UserWarning, match="the disk is full; features are no longer stored"):
        store.put("b" * 64, entry())
    store.put("c" * 64, entry())
    assert store.get("a" * 64) is not None
    assert [p.name for p in tmp_path.glob("*/*")] == ["a" * 62 + ".features"], "no half-written file"


def test_a_full_disk_is_an_error_for_a_shard(tmp_path, monkeypatch):
    def full(_self, _data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(CacheError, match=r"s0-0000.*cannot be written.*No space left"):
        shard(tmp_path)


def test_keys_differ_by_every_part():
    ids = torch.tensor([1, 2, 3])
    keys = {
        feature_key(ids, "d", (), torch.float32),
        feature_key(ids[:2], "d", (), torch.float32),
        feature_key(ids, "e", (), torch.float32),
        feature_key(ids, "d", (2,), torch.float32),
        feature_key(ids, "d", (), torch.bfloat16),
    }
    assert len(keys) == 5
