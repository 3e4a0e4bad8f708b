"""Which of the served models a request asks for.

A name comes from the line (JSON Lines, CSV), through the table `workload.models` where the trace
has names of its own. Requests that name none are dealt to the models in proportion to
`workload.model_shares`, in runs of `workload.model_run` requests in the mean, or go to the
default. A name that no model is served as is no mistake of the file: the request is rejected when
it arrives, as a server rejects it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Final

from emu.rng import rng_stream

UNKNOWN: Final = "unknown_model"
"""Reason of a request that asks for a model which is not served."""


class Naming:
    """Models of the requests of one pass over a workload.

    `default` is the index of the model of requests that name none, `run` the mean length of a
    run of equal draws.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        default: int = 0,
        aliases: Mapping[str, str] | None = None,
        shares: Mapping[str, float] | None = None,
        run: float = 1.0,
        seed: int = 0,
    ) -> None:
        """`names`: served models, by index. `run`: mean length of a run of equal draws."""
        self._index = {name: index for index, name in enumerate(names)}
        for alias, name in (aliases or {}).items():
            self._index[alias] = self._index.get(name, -1)
        self._default = default
        self._shares = list(accumulate((shares or {}).get(name, 0.0) for name in names))
        self._run = run
        self._rng = rng_stream(seed, "workload models")
        self._last = -1

    def of(self, name: str) -> int:
        """Index of the model that a line names (empty: it names none); -1 = it is not served."""
        if name:
            return self._index.get(name, -1)
        if not self._shares or self._shares[-1] <= 0:
            return self._default
        if self._last >= 0 and self._run > 1 and self._rng.random() >= 1 / self._run:
            return self._last
        point = self._rng.random() * self._shares[-1]
        self._last = min(bisect_right(self._shares, point), len(self._shares) - 1)
        return self._last
