"""``walk_tree``: follow the target's own draws through the draft tree.

Legend: N rows (the trees of all requests), R requests.  ``drawn`` i64 [N], the target's draw at each
row; ``token`` i64 [N], the token each row holds; ``parent`` i64 [N], row index or -1 at a root;
``cu_rows`` i32 [R+1], the rows of each request: root first, parents before their children.

Starting at the root, the walk moves to the lowest row that is a child of the current row and holds
its draw; it ends when there is none or after ``max_path`` rows.  Returns ``path`` i64 [R, max_path],
row indices whose tail repeats the last one, and ``path_len`` i64 [R] (at least 1).  Each step of
the walk accepts a draft token; the draw at the last row is the bonus token.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from speccompile.ops.registry import register

SCHEMA = (
    "walk_tree(Tensor drawn, Tensor token, Tensor parent, Tensor cu_rows, int max_path) "
    "-> (Tensor path, Tensor path_len)"
)


def reference(
    drawn_N: Tensor, token_N: Tensor, parent_N: Tensor, cu_rows_R1: Tensor, max_path: int
) -> tuple[Tensor, Tensor]:
    drawn, token, parent, cu = (x.tolist() for x in (drawn_N, token_N, parent_N, cu_rows_R1))
    paths = []
    for start, stop in pairwise(cu):
        path = [start]
        for row in range(start, stop):
            if len(path) < max_path and parent[row] == path[-1] and token[row] == drawn[path[-1]]:
                path.append(row)
        paths.append(path)
    padded = [path + path[-1:] * (max_path - len(path)) for path in paths]
    path_RP = torch.tensor(padded, dtype=torch.int64, device=drawn_N.device).reshape(len(paths), max_path)
    return path_RP, torch.tensor([len(p) for p in paths], dtype=torch.int64, device=drawn_N.device)


def fake(
    drawn_N: Tensor, token_N: Tensor, parent_N: Tensor, cu_rows_R1: Tensor, max_path: int
) -> tuple[Tensor, Tensor]:
    del token_N, parent_N
    requests = cu_rows_R1.shape[0] - 1
    return drawn_N.new_empty((requests, max_path)), drawn_N.new_empty((requests,))


walk_tree = register(SCHEMA, reference, fake)
