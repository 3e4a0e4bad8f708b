"""The figures of docs/speed.md and docs/lab/speed-details.md, from what the benchmarks kept.

    make bench                                   # benchmarks/results/*.json
    make bench-builds                            # both builds, the table of docs/speed.md
    python -m benchmarks.modes                   # what modes cost, the other table there
    python -m benchmarks.peers PEERS.toml        # if other emulators are at hand
    python -m benchmarks.write_speed             # print the tables
    python -m benchmarks.write_speed --write     # make bench-docs: and put them into the page

Tables stand between `<!-- speed: NAME -->` and `<!-- end of speed -->`. What they are made from is
kept beside the page in docs/figures/speed.json, so the same tables and the
figure can be made again without running anything. Parts that were not measured stay as they were.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.cases import ROOT
from benchmarks.measure import RESULTS
from benchmarks.peers import SHAPES, besides
from benchmarks.speed_figure import speed_svg

SHORT: Final = ROOT / "docs" / "speed.md"
PAGE: Final = ROOT / "docs" / "lab" / "speed-details.md"
KEPT: Final = ROOT / "docs" / "figures" / "speed.json"
FIGURE: Final = ROOT / "docs" / "figures" / "speed.svg"
PARTS: Final = ("bench", "builds", "modes", "peers", "sweep", "profile")
_BLOCK: Final = re.compile(
    r"<!-- speed: (\S+) -->\n(?:(?!<!-- speed: ).)*?<!-- end of speed -->", re.DOTALL
)
Kept = Mapping[str, Any]


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def where(kept: Kept) -> str:
    """Machine, revision and time of what `make bench` measured."""
    return place_and_time(kept["bench"], f"medians of {kept['bench']['repeats']}")


def place_and_time(facts: Mapping[str, Any], what: str) -> str:
    """One sentence."""
    return (
        f"{facts['date']}, revision {facts['revision']}, {facts['cpu']}, {facts['cores']} cores, "
        f"Python {facts['python']}, load {facts['load']} at the start; {what}."
    )


def cases(kept: Kept, *groups: str) -> str:
    """Rows of some groups of `make bench`."""
    heads = ["case", "requests / CPU s", "CPU s", "requests / wall s", "emulated s / wall s"]
    heads += ["events", "peak MiB"]
    rows = [
        [
            row["case"],
            f"{row['requests'] / row['cpu_s']:,.0f}",
            f"{row['cpu_s']:.2f}",
            f"{row['requests'] / row['wall_s']:,.0f}",
            f"{row['emulated_s'] / row['wall_s']:,.0f}",
            f"{row['events']:,.0f}",
            f"{row['peak_mib']:.0f}",
        ]
        for row in kept["bench"]["cases"]
        if row["group"] in groups
    ]
    return table(heads, rows)


def azure(kept: Kept) -> str:
    """The trace, or what stands in for it."""
    note = "" if kept["bench"]["has_trace"] else "\n\nA synthetic trace of the same size stood in."
    return cases(kept, "azure") + note


def memory(kept: Kept) -> str:
    """100,000 and a million, and the ratio."""
    peaks = {
        row["x"]: row["peak_mib"] for row in kept["bench"]["cases"] if row["group"] == "million"
    }
    ratio = peaks[max(peaks)] / peaks[min(peaks)]
    return cases(kept, "million") + f"\n\nTen times the requests take {ratio:.2f} times the memory."


def growth(kept: Kept) -> str:
    """Replicas and length of answers, CPU for a request."""
    rows = [
        [row["case"], f"{1e3 * row['cpu_s'] / row['requests']:.3f}", f"{row['peak_mib']:.0f}"]
        for row in kept["bench"]["cases"]
        if row["group"] in ("replicas", "output")
    ]
    return table(["case", "CPU ms a request", "peak MiB"], rows)


def kernel(kept: Kept) -> str:
    """Events of the kernel alone."""
    rows = [[name, f"{rate:,}"] for name, rate in kept["bench"]["kernel"].items()]
    return table(["what", "events / CPU s"], rows)


def peers(kept: Kept) -> str:
    """Measured in turn with emu, by cluster, long pieces of the trace first."""
    rows = []
    order = sorted(kept["peers"]["rows"], key=lambda r: (SHAPES.index(r["shape"]), -r["requests"]))
    for row in order:
        ours = row["requests"] / row["emu"]["cpu_s"]
        if "peer" not in row:
            cells = [row["problem"], "", "", f"{ours:,.0f}", "", "", ""]
        else:
            rate = row["requests"] / row["peer"]["cpu_s"]
            cells = [f"{rate:,.0f}", f"{row['peer']['cpu_s']:.2f}"]
            cells += [f"{row['peer']['peak_mib']:,.0f}"]
            cells += [f"{ours:,.0f}", f"{ours / rate:.1f}"]
            if "compiled" in row:
                compiled = row["requests"] / row["compiled"]["cpu_s"]
                cells += [f"{compiled:,.0f}", f"{compiled / rate:.1f}"]
            else:
                cells += ["", ""]
        rows.append([row["name"], row["shape"], f"{row['requests']:,}", *cells])
    heads = ["program", "cluster", "requests", "requests / CPU s", "CPU s", "peak MiB"]
    heads += ["emu's requests / CPU s", "emu / peer", "emu's, compiled", "compiled / peer"]
    return table(heads, rows)


def differences(kept: Kept) -> str:
    """What each program does that is not the same work."""
    notes = {row["name"]: row["notes"] for row in kept["peers"]["rows"] if row["notes"]}
    text = [f"- **{name}**: {note}." for name, note in notes.items()]
    names: dict[str, list[str]] = {}
    for row in kept["peers"]["rows"]:
        when = place_and_time(row, f"medians of {row['repeats']} in turn")
        if row["name"] not in names.setdefault(when, []):
            names[when].append(row["name"])
    text += [f"\n{', '.join(programs)}: {when}" for when, programs in names.items()]
    return "\n".join(text)


def sweep(kept: Kept) -> str:
    """A grid over more and more processes."""
    found, points = kept["sweep"], kept["sweep"]["points"]
    rows = []
    for row in found["rows"]:
        used_s = row["parent_s"] + row["workers_s"]
        cells = [str(row["jobs"]), f"{row['wall_s']:.1f}"]
        cells += [f"{found['rows'][0]['wall_s'] / row['wall_s']:.2f}"]
        cells += [f"{used_s / row['wall_s']:.2f}", f"{used_s / points:.2f}"]
        is_alone = row["jobs"] == 1
        cells += ["" if is_alone else f"{1e3 * row['parent_s'] / points:.1f}"]
        cells += ["" if is_alone else f"{row['workers_s'] / row['parent_s']:,.0f}"]
        rows.append(cells)
    heads = ["processes", "wall s", "speed-up", "cores busy", "CPU s a point"]
    heads += ["parent CPU ms a point", "workers a parent could feed"]
    what = f"{points} points of {found['requests']:,} requests"
    return table(heads, rows) + "\n\n" + place_and_time(found, what)


def profile(kept: Kept) -> str:
    """Shares of the rooms, side by side for the three clusters."""
    found = kept["profile"]["profiles"]
    rooms = dict.fromkeys(room for one in found for room, share in one["rooms"] if share >= 1)
    parts = [dict(one["rooms"]) for one in found]
    rows = [[room, *(f"{part.get(room, 0):.0f} %" for part in parts)] for room in rooms]
    samples = [f"{one['case']} ({one['samples']:,} samples)" for one in found]
    return table(["room", *samples], rows) + "\n\n" + place_and_time(kept["profile"], "sampled")


BLOCKS: Final[Mapping[str, Callable[[Kept], str]]] = {
    "where": where,
    "azure": azure,
    "memory": memory,
    "growth": growth,
    "stress": lambda kept: cases(kept, "overload", "burst"),
    "kernel": kernel,
    "peers": peers,
    "differences": differences,
    "sweep": sweep,
    "profile": profile,
}


DYNAMO: Final = "Dynamo 1.6.1 offline replay"


def builds(kept: Kept) -> str:
    """Both builds beside Dynamo where it was measured in turn with both; the fastest is bold."""
    dynamo = {
        f"azure {row['requests']}, {row['shape']}": row["requests"] / row["peer"]["cpu_s"]
        for row in kept["peers"]["rows"]
        if row["name"] == DYNAMO and "compiled" in row and "peer" in row
    }
    rows = []
    for row in kept["builds"]["rows"]:
        rates = [row["requests"] / cost["cpu_s"] for cost in row["costs"]]
        rates.append(dynamo.get(row["case"], 0))
        texts = [
            "" if not rate else f"**{rate:,.0f}**" if rate == max(rates) else f"{rate:,.0f}"
            for rate in rates
        ]
        seconds = " / ".join(f"{cost['cpu_s']:.2f}" for cost in row["costs"])
        rows.append([row["case"], *texts[:2], seconds, texts[2]])
    facts = kept["builds"]
    note = place_and_time(facts, f"both builds in turn, medians of {facts['repeats']}")
    heads = ["case", "emu, interpreted", "emu, compiled", "CPU s", "Dynamo 1.6.1"]
    return f"{table(heads, rows)}\n\nemu: {note}"


def modes(kept: Kept) -> str:
    """What modes cost beside a plain run, the dearest first."""
    facts = kept["modes"]
    rows = [
        [
            row["case"],
            f"{row['requests']:,}",
            f"{row['requests'] / row['cpu_s']:,.0f}",
            f"{row['plain_per_s']:,.0f}",
            f"{row['ratio']:.1f}",
        ]
        for row in sorted(facts["rows"], key=lambda row: -row["ratio"])
    ]
    heads = ["mode", "requests", "requests / CPU s", "plain beside it", "times as dear"]
    note = place_and_time(
        facts, f"compiled, in turn with plain runs, medians of {facts['repeats']}"
    )
    return f"{table(heads, rows)}\n\n{note}"


SHORT_BLOCKS: Final[Mapping[str, Callable[[Kept], str]]] = {"builds": builds, "modes": modes}


def gathered() -> dict[str, Any]:
    """What is kept beside the page, with newer results in place of older ones."""
    kept: dict[str, Any] = json.loads(KEPT.read_text()) if KEPT.is_file() else {}
    others = kept["peers"]["rows"] if "peers" in kept else []
    for part in PARTS:
        path = RESULTS / f"{part}.json"
        if path.is_file():
            kept[part] = json.loads(path.read_text())
    if "peers" in kept:  # programs that are not at hand today keep their rows
        rows = kept["peers"]["rows"]
        kept["peers"]["rows"] = rows + besides(rows, others)
    missing = [part for part in PARTS if part not in kept]
    if missing:
        raise SystemExit(f"not measured yet: {', '.join(missing)}; run make bench (and peers)")
    return kept


def _wrapped(line: str) -> str:
    """Prose in lines of the page's width; tables stay."""
    if line.startswith("|"):
        return line
    later = "  " if line.startswith("- ") else ""
    return textwrap.fill(line, 120, subsequent_indent=later, break_on_hyphens=False)


def rendered(text: str, kept: Kept) -> str:
    """The page with its blocks filled."""

    def fill(match: re.Match[str]) -> str:
        name = match[1]
        block = "\n".join(map(_wrapped, {**BLOCKS, **SHORT_BLOCKS}[name](kept).split("\n")))
        return f"<!-- speed: {name} -->\n\n{block}\n\n<!-- end of speed -->"

    return _BLOCK.sub(fill, text)


def main() -> int:
    """Print, or write."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.write_speed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--write", action="store_true", help="into the page and docs/figures")
    options = parser.parse_args()
    kept = gathered()
    if not options.write:
        print(
            "\n\n".join(
                f"## {name}\n\n{block(kept)}" for name, block in {**SHORT_BLOCKS, **BLOCKS}.items()
            )
        )
        return 0
    KEPT.parent.mkdir(exist_ok=True)
    KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    FIGURE.write_text(speed_svg(kept["bench"]["cases"]))
    for page in (SHORT, PAGE):
        page.write_text(rendered(page.read_text(), kept))
    written = (SHORT, PAGE, KEPT, FIGURE)
    print(f"written: {', '.join(str(Path(p).relative_to(ROOT)) for p in written)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
