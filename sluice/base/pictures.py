"""Image files of plots: checks before drawing, and atomic writes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from sluice.base.errors import SluiceError, UsageError
from sluice.base.files import write_atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".svg", ".png")


def check_plot(path: Path) -> None:
    """Raise, before the long work, anything that would prevent the plot from being drawn."""
    if path.suffix not in SUFFIXES:
        raise UsageError(f"--plot {path}: ends in {path.suffix or 'nothing'!r}", remedy="name it .svg or .png")
    if not path.parent.is_dir():
        raise UsageError(f"--plot {path}: no folder {path.parent}", remedy="create it, or name another")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise SluiceError(
            f"--plot {path}: matplotlib is not installed", remedy="install it with: pip install matplotlib"
        ) from None


def save_plot(figure: Figure, path: Path) -> None:
    """Write an image atomically, in the format of its suffix. Raises SluiceError."""
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix[1:])
    try:
        write_atomic(path, picture.getvalue())
    except OSError as error:
        raise SluiceError(f"--plot {path}: {error.strerror}") from error
