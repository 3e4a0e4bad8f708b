"""The skew correction of a profile bundle: what unequal histories of a batch add, by bins."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray


class SkewAxes:
    """Bins of the skew correction: (edges, labels) of each axis; label i ends at edge i + 1."""

    __slots__ = ("edges", "labels")

    def __init__(self, axes: Mapping[str, tuple[Sequence[float], Sequence[str]]]) -> None:
        assert list(axes) == list(SKEW_AXES)
        # The first edge of an axis is its lower end and never decides.
        self.edges = tuple(tuple(edges[1:]) for edges, _ in axes.values())
        self.labels = tuple(tuple(labels) for _, labels in axes.values())


SKEW_AXES: Final = ("n", "skew_rate", "kv_big", "kp")

OLD_SKEW_AXES: Final = SkewAxes(
    {
        "n": (
            [0, 2, 4, 8, 16, 32, 64, 128, 1_000_000],
            ["n<=2", "n<=4", "n<=8", "n<=16", "n<=32", "n<=64", "n<=128", "n>128"],
        ),
        "skew_rate": (
            [-0.01, 0.05, 0.15, 0.4, 0.7, 1.01],
            ["sr<=5%", "sr<=15%", "sr<=40%", "sr<=70%", "sr>70%"],
        ),
        "kv_big": (
            [0, 1024, 4096, 16384, 1_000_000_000],
            ["kvB<=1k", "kvB<=4k", "kvB<=16k", "kvB>16k"],
        ),
        "kp": ([-1, 0, 2048, 1_000_000_000], ["kp=0", "kp<=2k", "kp>2k"]),
    }
)
"""For bundles that do not say their bins."""


class SkewTable:
    """How far a batch of unequal histories moves from the time at their mean to that at their
    maximum: a fraction by (exact prefill chunk, decodes, skewness, longest history, prompt
    history). Chunks that were not profiled, and empty buckets, use the default.
    """

    __slots__ = ("_alphas", "_default", "_edges", "_sizes")

    def __init__(self, axes: SkewAxes, by_key: Mapping[str, float], default: float) -> None:
        self._edges = axes.edges
        self._sizes = [len(labels) for labels in axes.labels]
        self._default = default
        chunks = sorted({int(key.split("|", 1)[0].removeprefix("pc=")) for key in by_key})
        n_labels, rate_labels, big_labels, kp_labels = axes.labels
        self._alphas = {
            pc: [
                by_key.get(f"pc={pc}|{n}|{rate}|{big}|{kp}", default)
                for n in n_labels
                for rate in rate_labels
                for kp in kp_labels
                for big in big_labels
            ]
            for pc in chunks
        }

    def _label(self, axis: int, value: float) -> int:
        return min(bisect_left(self._edges[axis], value), self._sizes[axis] - 1)

    def _row(self, nd: int, rate: float, kp: int) -> int:
        _, rates, bigs, kps = self._sizes
        row = (self._label(0, nd) * rates + self._label(1, rate)) * kps + self._label(3, kp)
        return row * bigs

    def alpha(self, pc: int, nd: int, rate: float, kv_max: int, kp: int) -> float:
        """The fraction for one batch.

        `pc` new prompt tokens after `kp` tokens of history; `nd` decodes.
        """
        alphas = self._alphas.get(pc)
        if alphas is None:
            return self._default
        return alphas[self._row(nd, rate, kp) + self._label(2, kv_max)]

    def alphas(
        self, pc: int, nd: int, rate: float, kv_max: NDArray[np.int64], kp: int
    ) -> NDArray[np.float64]:
        """`alpha` over many longest histories of one batch, rising, with its `pc` and `kp`."""
        first, last = self._label(2, int(kv_max[0])), self._label(2, int(kv_max[-1]))
        alphas = self._alphas.get(pc)
        if alphas is None or first == last:
            return np.full(len(kv_max), self.alpha(pc, nd, rate, int(kv_max[0]), kp))
        start = self._row(nd, rate, kp)
        row = np.array(alphas[start : start + self._sizes[2]])
        labels = np.searchsorted(self._edges[2], kv_max, side="left")
        return row[np.minimum(labels, self._sizes[2] - 1)]
