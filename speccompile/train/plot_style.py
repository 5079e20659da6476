"""What the figures share: a colour-blind safe palette, a plain style, and writing the PNG."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from speccompile.errors import SpeccompileError

# Okabe and Ito, "Color Universal Design", without the yellow that is faint on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
LINES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_STYLE: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "font.size": 10,
}


def style() -> AbstractContextManager[None]:
    """The context that figures are drawn in."""
    return matplotlib.rc_context(_STYLE)


def panels(
    rows: int, columns: int, *, width: float, height: float, sharex: bool = False
) -> tuple[Figure, Any]:
    """A figure and its axes [rows, columns]; sizes are of one panel, in inches."""
    figure = Figure(figsize=(width * columns, height * rows))
    figure.set_layout_engine(ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08))
    return figure, figure.subplots(rows, columns, squeeze=False, sharex=sharex)


def legend_below(axes: Any, columns: int, handles: list[Any] | None = None) -> None:
    """A legend under the panel, where no data is; of ``handles``, or of what was drawn with a label."""
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.19), "ncols": columns}
    axes.legend(**place, **({} if handles is None else {"handles": handles}))


def nth(values: Any, index: int) -> Any:
    """``values[index]``, beginning again after the last."""
    return values[index % len(values)]


def save(figure: Figure, path: Path) -> None:
    """Writes the PNG.  Raises SpeccompileError when it cannot be written."""
    try:
        figure.savefig(path, format="png", dpi=130)
    except OSError as error:
        raise SpeccompileError(f"{path}: the figure cannot be written ({error})") from error
