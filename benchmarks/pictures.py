"""How benchmarks draw: matplotlib, imported where a picture is asked for and never on a screen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def picture(path: Path, panels: int, size: tuple[float, float], title: str = "") -> Iterator[Sequence[Any]]:
    """Axes of so many panels side by side, ``size`` in inches in all; written to ``path`` when the block is over."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, panels, figsize=size, layout="constrained", squeeze=False)
    yield axes[0]
    if title:
        figure.suptitle(title)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def batch_sizes(axis: Any, sizes: Sequence[int]) -> None:
    """Make the x axis one of batch sizes, each twice the one before or so."""
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, [str(size) for size in sizes])
