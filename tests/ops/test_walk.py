"""walk_tree: paths through small trees, duplicates included."""

from __future__ import annotations

import pytest
import torch

from speccompile.ops import walk, walk_tree

pytestmark = pytest.mark.usefixtures("plugin")
BOTH = pytest.mark.parametrize("step", [walk.reference, walk_tree], ids=["reference", "kernel"])


def _walk(step, drawn: list, token: list, parent: list, cu_rows: list, max_path: int) -> tuple[list, list]:
    path, length = step(*map(torch.tensor, (drawn, token, parent)), torch.tensor(cu_rows).int(), max_path)
    assert path.dtype == length.dtype == torch.int64
    return path.tolist(), length.tolist()


@BOTH
def test_each_request_follows_its_own_draws(step) -> None:
    drawn = [5, 0, 7, 9, 3, 4, 4]
    token = [1, 6, 5, 7, 2, 3, 8]
    parent = [-1, 0, 0, 2, -1, 4, 4]
    path, length = _walk(step, drawn, token, parent, [0, 4, 7], 4)
    assert path == [[0, 2, 3, 3], [4, 5, 5, 5]]
    assert length == [3, 2]


@BOTH
def test_a_rejected_root_and_a_bare_root(step) -> None:
    path, length = _walk(step, [5, 5, 9], [1, 4, 7], [-1, 0, -1], [0, 2, 3], 3)
    assert path == [[0, 0, 0], [2, 2, 2]]
    assert length == [1, 1]


@BOTH
def test_duplicate_children_take_the_lowest_row(step) -> None:
    drawn, token, parent = [5, 6, 8, 8, 8], [0, 5, 5, 6, 6], [-1, 0, 0, 2, 1]
    path, length = _walk(step, drawn, token, parent, [0, 5], 4)
    assert path == [[0, 1, 4, 4]]
    assert length == [3]


@BOTH
def test_stops_at_the_longest_path(step) -> None:
    path, length = _walk(step, [5, 5, 5, 5], [5, 5, 5, 5], [-1, 0, 1, 2], [0, 4], 3)
    assert path == [[0, 1, 2]]
    assert length == [3]


def test_kernel_equals_the_reference_on_random_forests() -> None:
    for _ in range(20):
        sizes = torch.randint(1, 20, (5,))
        cu_rows = torch.cat([torch.zeros(1), sizes.cumsum(0)]).int()
        parent = torch.cat(
            [torch.tensor([-1] + [int(torch.randint(j, (1,))) for j in range(1, n)]) for n in sizes]
        )
        parent = torch.where(parent < 0, parent, parent + cu_rows[:-1].long().repeat_interleave(sizes))
        drawn, token = torch.randint(3, (2, len(parent)))
        ours, plain = (
            walk_tree(drawn, token, parent, cu_rows, 6),
            walk.reference(drawn, token, parent, cu_rows, 6),
        )
        assert torch.equal(ours[0], plain[0])
        assert torch.equal(ours[1], plain[1])
