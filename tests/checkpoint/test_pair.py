"""Heads that do not belong to their target, and the shared or kept embedding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from speccompile.checkpoint.heads import HeadOverrides, open_head
from speccompile.checkpoint.pair import check_pair
from speccompile.checkpoint.target import EMBEDDING, Target
from speccompile.errors import CheckpointError, PairError
from tests.checkpoint import head_builders as build
from tests.checkpoint.head_builders import TARGET, VOCAB, Config, Tensors


@pytest.fixture
def target(tmp_path: Path) -> Target:
    return build.target(tmp_path / "target")


@pytest.mark.parametrize(
    "writer", [build.safeailab1, build.reduced_eagle1, build.safeailab3, build.small_eagle3, build.modelopt]
)
def test_matching_pairs_pass(tmp_path: Path, target: Target, writer) -> None:  # type: ignore[no-untyped-def]
    head = open_head(writer(tmp_path / "head"), target.config)
    assert check_pair(target, head) is head


@pytest.mark.parametrize("writer", [build.safeailab1, build.safeailab3, build.small_eagle3])
def test_hidden_size(tmp_path: Path, writer) -> None:  # type: ignore[no-untyped-def]
    other = build.target(tmp_path / "other", h=48)
    head = open_head(writer(tmp_path / "head"), other.config)
    with pytest.raises(PairError, match=r"head: .*expects hidden size 64, but .*other has 48"):
        check_pair(other, head)


def test_vocabulary_size(tmp_path: Path) -> None:
    other = build.target(tmp_path / "other", vocab=500)
    head = open_head(build.safeailab1(tmp_path / "head"), other.config)
    with pytest.raises(PairError, match=r"expects vocabulary size 512, but .*other has 500"):
        check_pair(other, head)


def test_layer_ids(tmp_path: Path, target: Target) -> None:
    head = open_head(
        build.safeailab3(tmp_path / "head"), target.config, overrides=HeadOverrides(aux_layers=(2, 4, 8))
    )
    with pytest.raises(PairError, match=r"input of target layer 8 .* has 8 layers, 0 to 7"):
        check_pair(target, head)


def write_tokenizer(folder: Path, words: dict[str, int], added: tuple[str, ...] = ()) -> None:
    tokenizer = Tokenizer(WordLevel(words, unk_token="a"))
    tokenizer.add_special_tokens(list(added))
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize(
    ("words", "fine"), [({"a": 0, "b": 1}, True), ({"a": 1, "b": 0}, False), ({"a": 0}, False)]
)
def test_tokenizer(tmp_path: Path, target: Target, words: dict[str, int], fine: bool) -> None:
    folder = build.safeailab1(tmp_path / "head")
    write_tokenizer(target.path, {"a": 0, "b": 1})
    write_tokenizer(folder, words)
    head = open_head(folder, target.config)
    if fine:
        check_pair(target, head)
        return
    with pytest.raises(PairError, match=rf"another tokenizer: {len(words)} tokens, .* has 2; "):
        check_pair(target, head)


def test_added_tokens_of_one_side_are_no_difference(tmp_path: Path, target: Target) -> None:
    folder = build.safeailab1(tmp_path / "head")
    write_tokenizer(target.path, {"a": 0, "b": 1})
    write_tokenizer(folder, {"a": 0, "b": 1}, added=("[PAD]",))
    check_pair(target, open_head(folder, target.config))


@pytest.mark.parametrize("changed_row", [None, 0, 300, VOCAB - 1])
def test_embedding_is_shared_only_when_all_rows_are_equal(
    tmp_path: Path, target: Target, changed_row: int | None
) -> None:
    """Probe L07: one decision over the whole matrix."""

    def edit(_: Config, tensors: Tensors) -> None:
        own = target.tensor(EMBEDDING).clone()
        if changed_row is not None:
            own[changed_row] += 1
        tensors["embed_tokens.weight"] = own

    head = open_head(build.safeailab1(tmp_path / "head", edit), target.config)
    assert head.config.own_embedding
    kept = check_pair(target, head)
    assert kept.config.own_embedding is (changed_row is not None)
    assert ("embed_tokens.weight" in kept.names()) is (changed_row is not None)


def test_small_head_keeps_its_embedding(tmp_path: Path, target: Target) -> None:
    """Probe L05."""
    head = check_pair(target, open_head(build.small_eagle3(tmp_path / "head"), target.config))
    assert head.config.own_embedding
    assert head.tensor("embed_tokens.weight").shape == (VOCAB, 32)


def test_embedding_of_another_dtype_is_compared_in_the_targets(tmp_path: Path, target: Target) -> None:
    path = target.path
    weights = {n: target.tensor(n).to(torch.bfloat16) for n in target.expected_shapes}
    build.write(path, {**build.llama_block(), "num_hidden_layers": 8, "head_dim": 16}, weights, None)
    low = build.open_target(path)

    def edit(_: Config, tensors: Tensors) -> None:
        tensors["embed_tokens.weight"] = weights[EMBEDDING].to(torch.float16)

    head = check_pair(low, open_head(build.safeailab3(tmp_path / "head", edit), low.config))
    assert not head.config.own_embedding


def test_target_given_as_head_is_refused(target: Target) -> None:
    with pytest.raises(CheckpointError, match="a full model, not a draft head"):
        open_head(target.path, TARGET)
