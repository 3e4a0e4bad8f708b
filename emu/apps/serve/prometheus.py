"""Prometheus' text format (0.0.4), written straight into lines.

A scrape of a hundred replicas has thousands of samples, and a router asks many times a second;
the objects that a client library makes of each cost more than the emulation itself. The text of a
histogram is kept until it has a new observation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from emu.apps.serve.statistics import Histogram

METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_ESCAPES: Final = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def labels_text(labels: Mapping[str, str]) -> str:
    """`a="x",b="y"`, sorted by name."""
    return ",".join(
        f'{name}="{value.translate(_ESCAPES)}"' for name, value in sorted(labels.items())
    )


def number_text(value: float) -> str:
    """The number as Prometheus' own library writes it."""
    return repr(float(value))


class Page:
    """Lines of one answer, and the histograms' texts that outlive it."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._histograms: dict[tuple[str, str], tuple[int, str]] = {}

    def take(self) -> bytes:
        """The page so far; the next one begins empty."""
        text = "\n".join(self._lines) + "\n"
        self._lines.clear()
        return text.encode()

    def head(self, name: str, text: str, kind: str) -> None:
        """The lines before the samples of a family."""
        self._lines += (f"# HELP {name} {text}", f"# TYPE {name} {kind}")

    def samples(self, name: str, rows: Iterable[tuple[str, float]]) -> None:
        """(labels as text, value) of each."""
        self._lines += [
            f"{name}{{{labels}}} {number_text(value)}" if labels else f"{name} {number_text(value)}"
            for labels, value in rows
        ]

    def gauge(self, name: str, text: str, rows: Iterable[tuple[str, float]]) -> None:
        """A family of gauges."""
        self.head(name, text, "gauge")
        self.samples(name, rows)

    def counter(self, name: str, text: str, rows: Iterable[tuple[str, float]]) -> None:
        """A family of counters; `_total` is added to the name."""
        self.head(f"{name}_total", text, "counter")
        self.samples(f"{name}_total", rows)

    def histogram(self, name: str, text: str, rows: Iterable[tuple[str, Histogram]]) -> None:
        """A family of histograms."""
        self.head(name, text, "histogram")
        for labels, histogram in rows:
            known = self._histograms.get((name, labels))
            if known is None or known[0] != histogram.observed:
                lines = "\n".join(_histogram_lines(name, labels, histogram))
                known = self._histograms[name, labels] = (histogram.observed, lines)
            self._lines.append(known[1])


def _histogram_lines(name: str, labels: str, histogram: Histogram) -> Sequence[str]:
    lines = []
    reached = 0
    bounds = [f"{b:g}" if b != int(b) else f"{b:.1f}" for b in histogram.bounds]
    before, after = _around_le(labels)
    for bound, count in zip([*bounds, "+Inf"], histogram.counts, strict=True):
        reached += count
        lines.append(f'{name}_bucket{{{before}le="{bound}"{after}}} {number_text(reached)}')
    lines.append(f"{name}_count{{{labels}}} {number_text(reached)}")
    lines.append(f"{name}_sum{{{labels}}} {number_text(histogram.total)}")
    return lines


def _around_le(labels: str) -> tuple[str, str]:
    """What comes before and after `le` where labels are sorted by name."""
    given = labels.split(",") if labels else []
    before = [item for item in given if item < "le="]
    after = [item for item in given if item >= "le="]
    return ",".join(before) + "," * bool(before), "," * bool(after) + ",".join(after)
