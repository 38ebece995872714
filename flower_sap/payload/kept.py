"""What a node keeps on its disk between messages: one file of arrays, whole or not.

Flower 1.42 loses a large `context.state` without a word, so what is large goes to a
file of its own, in safetensors' format, one a run series, node and purpose. Of each
node and purpose the newest few are kept.
"""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

_SERIES_KEPT = 4  # files of one node and purpose, the newest


class KeptFile:
    """Arrays by name, with a few words about them.

    Parameters
    ----------
    folder : Path
        Made if missing.
    node, purpose, series : str
        Whose it is, what for, and of which run series.
    """

    def __init__(self, folder: Path, *, node: str, purpose: str, series: str) -> None:
        self._folder = folder
        self._kind = f"{node}-{purpose}"
        self.path = folder / f"{self._kind}-{series}.safetensors"

    def load(self) -> tuple[dict[str, NDArray[Any]], dict[str, str]] | None:
        """Return arrays and words; None if nothing is there, or it is damaged."""
        try:
            with safe_open(self.path, framework="numpy") as file:
                names = list(file.keys())
                return {n: file.get_tensor(n) for n in names}, file.metadata() or {}
        except (OSError, SafetensorError, KeyError, ValueError):
            return None

    def save(
        self, arrays: Mapping[str, NDArray[Any]], words: Mapping[str, str]
    ) -> None:
        """Replace what was saved; a crash leaves the old file."""
        self._folder.mkdir(parents=True, exist_ok=True)
        if not self.path.exists():
            self._forget_old_series()
        beside = self.path.with_suffix(f".{os.getpid()}.tmp")
        solid = {name: np.ascontiguousarray(a) for name, a in arrays.items()}
        with beside.open("wb") as file:
            file.write(save(solid, metadata=dict(words)))
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, self.path)

    def _forget_old_series(self) -> None:
        with contextlib.suppress(OSError):  # another run may be tidying up as well
            files = sorted(
                self._folder.glob(f"{self._kind}-*.safetensors"),
                key=lambda path: (path.stat().st_mtime_ns, path.name),
            )
            for path in files[: 1 - _SERIES_KEPT]:
                path.unlink(missing_ok=True)
