"""Reduced draft vocabularies: offsets, masks and the mistakes found in published files (L09, L11)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from speccompile.checkpoint.head_vocab import draft_offsets
from speccompile.checkpoint.heads import Head, open_head
from speccompile.errors import CheckpointError
from tests.checkpoint import head_builders as build
from tests.checkpoint.head_builders import DRAFT, TARGET, VOCAB, Config, Tensors


def with_map(folder: Path, d2t: Tensor | None, t2d: Tensor | None = None, writer=build.safeailab3) -> Head:  # type: ignore[no-untyped-def]
    def edit(_: Config, tensors: Tensors) -> None:
        for name, value in (("d2t", d2t), ("t2d", t2d)):
            tensors.pop(name, None)
            if value is not None:
                tensors[name] = value

    return open_head(writer(folder, edit), TARGET)


def test_offsets_stay_int64(tmp_path: Path) -> None:
    head = with_map(tmp_path, build.vocab_map()["d2t"].to(torch.int32))
    assert head.tensor("d2t").dtype == torch.int64
    assert torch.equal(head.tensor("d2t") + torch.arange(DRAFT), build.kept_ids())


@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("wrong", ["counter", "absolute"])
def test_absolute_ids_are_refused(tmp_path: Path, wrong: str, with_mask: bool) -> None:
    d2t = torch.arange(DRAFT) if wrong == "counter" else build.kept_ids()
    mask = build.vocab_map()["t2d"] if with_mask else None
    with pytest.raises(CheckpointError, match=r"model\.safetensors: d2t .*looks like absolute ids"):
        with_map(tmp_path, d2t, mask)


def test_absolute_ids_inside_the_vocabulary_are_refused() -> None:
    ids = torch.tensor([3, 4, 7, 20, 31])
    with pytest.raises(CheckpointError, match="looks like absolute ids"):
        draft_offsets(ids, None, 5, 100, "f")


@pytest.mark.parametrize(("index", "value"), [(0, -1), (DRAFT - 1, VOCAB - DRAFT + 1)])
def test_out_of_range(tmp_path: Path, index: int, value: int) -> None:
    d2t = build.vocab_map()["d2t"]
    d2t[index] = value
    with pytest.raises(CheckpointError, match=r"d2t reaches target ids .* outside 0 to 511"):
        with_map(tmp_path, d2t)


def test_ids_must_increase(tmp_path: Path) -> None:
    d2t = build.vocab_map()["d2t"]
    d2t[5] = d2t[4] - 1
    with pytest.raises(CheckpointError, match=r"maps draft id 5 .* must increase"):
        with_map(tmp_path, d2t)


def test_float_offsets_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"d2t is torch\.bfloat16"):
        with_map(tmp_path, build.vocab_map()["d2t"].to(torch.bfloat16))


def test_wrong_length(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"d2t has shape \[100\], expected \[128\]"):
        with_map(tmp_path, build.vocab_map()["d2t"][:100])


def test_mask_popcount_must_match(tmp_path: Path) -> None:
    """Probe L11."""
    t2d = build.vocab_map()["t2d"]
    t2d[build.kept_ids()[100:]] = False
    with pytest.raises(CheckpointError, match="t2d has 100 True values, but the draft vocabulary has 128"):
        with_map(tmp_path, build.vocab_map()["d2t"], t2d)


def test_mask_must_select_the_same_ids(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="select different target ids"):
        with_map(tmp_path, build.vocab_map()["d2t"], build.vocab_map()["t2d"].flip(0))


def test_mask_of_wrong_length(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"t2d has shape \[256\], expected \[512\]"):
        with_map(tmp_path, build.vocab_map()["d2t"], build.vocab_map()["t2d"][:256])


def test_all_ones_mask_is_ignored(tmp_path: Path) -> None:
    head = with_map(tmp_path, build.vocab_map()["d2t"], torch.ones(VOCAB, dtype=torch.bool))
    assert torch.equal(head.tensor("d2t"), build.vocab_map()["d2t"])


def test_zeros_are_the_identity(tmp_path: Path) -> None:
    head = with_map(tmp_path, torch.zeros(DRAFT, dtype=torch.int64))
    assert not head.tensor("d2t").any()


def test_evenly_thinned_vocabulary_is_accepted() -> None:
    offsets = draft_offsets(torch.arange(25) * 3, None, 25, 100, "f")
    assert offsets is not None
    assert torch.equal(offsets, torch.arange(25) * 3)


def test_every_second_id_is_accepted_when_the_mask_confirms_it() -> None:
    t2d = torch.arange(100) % 2 == 0
    assert draft_offsets(torch.arange(50), t2d, 50, 100, "f") is not None


def test_mask_alone_gives_the_map(tmp_path: Path) -> None:
    head = with_map(tmp_path, None, build.vocab_map()["t2d"])
    assert torch.equal(head.tensor("d2t"), build.vocab_map()["d2t"])


def test_missing_map_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"'d2t' is missing.*\(128\) is smaller than the vocabulary \(512\)"
    ):
        with_map(tmp_path, None)


def test_full_vocabulary_drops_the_identity_map(tmp_path: Path) -> None:
    def edit(config: Config, tensors: Tensors) -> None:
        tensors["lm_head.weight"] = torch.ones(VOCAB, build.H)
        tensors["d2t"] = torch.zeros(VOCAB, dtype=torch.int64)
        del tensors["t2d"], config["draft_vocab_size"]

    head = open_head(build.safeailab3(tmp_path, edit), TARGET)
    assert head.config.draft_vocab_size == VOCAB
    assert "d2t" not in head.names()


def test_reduced_eagle1_uses_the_targets_lm_head(tmp_path: Path) -> None:
    head = open_head(build.reduced_eagle1(tmp_path), TARGET)
    assert (head.config.kind, head.config.own_lm_head) == ("eagle1", False)
    assert head.config.draft_vocab_size == DRAFT
    assert torch.equal(head.tensor("d2t"), build.vocab_map()["d2t"])


def test_reduced_eagle1_is_checked_too(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="looks like absolute ids"):
        with_map(tmp_path, torch.arange(DRAFT), writer=build.reduced_eagle1)


@pytest.mark.parametrize("writer", [build.safeailab3, build.reduced_eagle1])
def test_stated_draft_vocabulary_must_agree(tmp_path: Path, writer) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(CheckpointError, match="has 128 rows, but draft_vocab_size is 64"):
        open_head(writer(tmp_path, lambda config, _: config.update(draft_vocab_size=64)), TARGET)


def test_stated_reduction_without_tensors(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="draft_vocab_size is 64 of 512, but the head holds neither"):
        open_head(build.safeailab1(tmp_path, lambda config, _: config.update(draft_vocab_size=64)), TARGET)
