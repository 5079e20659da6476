"""A tree as text, for ``speccompile inspect``."""

from __future__ import annotations

from speccompile.tree.tree import Tree


def draw(tree: Tree) -> str:
    """One line per row: ``row:rank`` under its parent, the root on top, then the counts."""
    lines = ["0:root"]
    below: list[list[int]] = [[] for _ in range(tree.rows)]
    for row in range(1, tree.rows):
        below[tree.parent[row]].append(row)

    def visit(row: int, indent: str) -> None:
        for child in below[row]:
            last = child == below[row][-1]
            lines.append(f"{indent}{'└─' if last else '├─'}{child}:{tree.rank[child]}")
            visit(child, indent + ("  " if last else "│ "))

    visit(0, "")
    lines.append(f"{tree.name}: {tree.num_nodes} drafts, depth {tree.depth}, {tree.rows} rows (drafts + 1)")
    return "\n".join(lines)
