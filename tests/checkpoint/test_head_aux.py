"""Aux layers: two numberings, defaults, small targets (probe B09)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from speccompile.checkpoint.head_aux import default_aux_layers
from speccompile.checkpoint.heads import HeadOverrides, open_head
from speccompile.errors import CheckpointError
from tests.checkpoint import head_builders as build
from tests.checkpoint.head_builders import TARGET, Config, H, Tensors

KEY = "eagle_aux_hidden_state_layer_ids"


def aux(folder: Path, layers: int = 8, override: tuple[int, ...] | None = None) -> tuple[int, ...]:
    target = replace(TARGET, num_hidden_layers=layers)
    return open_head(folder, target, overrides=HeadOverrides(aux_layers=override)).config.aux_layers


@pytest.mark.parametrize(
    ("layers", "expected"),
    [(7, (2, 3, 4)), (8, (2, 4, 5)), (32, (2, 16, 29)), (48, (2, 24, 45)), (80, (2, 40, 77))],
)
def test_defaults(layers: int, expected: tuple[int, ...]) -> None:
    assert default_aux_layers(layers, Path("config.json")) == expected


def test_nested_ids_count_outputs_and_top_level_ids_count_inputs(tmp_path: Path) -> None:
    assert aux(build.modelopt(tmp_path / "nested")) == (1, 4, 6)

    def edit(config: Config, _: Tensors) -> None:
        config[KEY] = [1, 4, 6]

    assert aux(build.speculators(tmp_path / "top", edit)) == (1, 4, 6)


def test_both_keys_must_name_the_same_layers(tmp_path: Path) -> None:
    def agree(config: Config, _: Tensors) -> None:
        config[KEY] = [1, 4, 6]

    assert aux(build.modelopt(tmp_path / "a", agree)) == (1, 4, 6)

    def disagree(config: Config, _: Tensors) -> None:
        config[KEY] = [0, 3, 5]

    with pytest.raises(CheckpointError, match=r"\[0, 3, 5\].*\(output of layer\) name different layers"):
        aux(build.modelopt(tmp_path / "b", disagree))


def test_features_are_in_ascending_order(tmp_path: Path) -> None:
    def edit(config: Config, _: Tensors) -> None:
        config[KEY] = [6, 1, 4]

    assert aux(build.speculators(tmp_path, edit)) == (1, 4, 6)


@pytest.mark.parametrize("ids", [[1, 1, 3], [-2, 1, 3], ["1", 2, 3], 5])
def test_bad_ids(tmp_path: Path, ids: object) -> None:
    with pytest.raises(CheckpointError, match=r"distinct, not negative|must be a list of integers"):
        aux(build.speculators(tmp_path, lambda config, _: config.update({KEY: ids})))


@pytest.mark.parametrize("layers", [1, 2, 4, 6])
def test_small_targets_need_explicit_layers(tmp_path: Path, layers: int) -> None:
    folder = build.safeailab3(tmp_path)
    with pytest.raises(
        CheckpointError, match=rf"collapse for a target of {layers} layers.*aux_layers override"
    ):
        aux(folder, layers)
    if layers > 2:
        assert aux(folder, layers, override=(0, 1, 2)) == (0, 1, 2)


def test_override_replaces_stated_ids(tmp_path: Path) -> None:
    assert aux(build.modelopt(tmp_path), override=(0, 3, 5)) == (0, 3, 5)
    with pytest.raises(CheckpointError, match="aux_layers override: aux layers"):
        aux(tmp_path, override=(3, 3, 5))
    with pytest.raises(CheckpointError, match="at least one"):
        aux(tmp_path, override=())


def test_number_of_layers_must_match_fc(tmp_path: Path) -> None:
    folder = build.specforge(tmp_path, lambda config, _: config.update(target_hidden_size=H))
    with pytest.raises(CheckpointError, match=r"takes 192 features, but aux layers \[2, 5\].*give 128"):
        aux(folder, override=(2, 5))


def test_two_state_fc_is_never_fed_with_three(tmp_path: Path) -> None:
    """ModelOpt de-duplicates collapsed defaults, which leaves an fc of two states."""

    def edit(_: Config, tensors: Tensors) -> None:
        tensors["fc.weight"] = torch.ones(H, 2 * H)

    folder = build.safeailab3(tmp_path, edit)
    with pytest.raises(
        CheckpointError,
        match=r"fc\.weight.*takes 128 features, but aux layers .* of target_hidden_size 64 give 192",
    ):
        aux(folder)
    assert aux(folder, override=(2, 5)) == (2, 5)
