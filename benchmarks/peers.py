"""Other emulators and emu in turn, on the same machine in the same hour.

    python -m benchmarks.peers PEERS.toml [--repeats 3] [--only NAME]

Nothing is downloaded or built here: the file says how the programs that you have are started.

    [[peer]]
    name = "what the table calls it"
    shape = "8 replicas"                 # 1 replica | 8 replicas | 4P+4D: emu runs the same
    requests = 19366                     # of the Azure conversation trace, from its start
    command = ["/opt/peer/bin/replay", "azure_19366.jsonl", "--workers", "8"]
    directory = "/opt/peer"              # where it is started, as seen from the file; absent: there
    notes = "what it does that emu does not, and the other way round"

For each row they run in turn: emu, emu compiled (if that build is of these sources: `make
compile`), peer, and again; a busy machine hits all alike. `benchmarks/dynamo.toml` is such a file
whose program can be had from the package registry. Figures
are medians of whole processes, start-up and output included. emu runs as users run it: KV blocks,
router, chunked prefill, all files of a run written (the HTML report aside). Results are kept in
benchmarks/results/peers.json, rows of earlier calls with other names included.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any, Final

from benchmarks.builds import BUILDS, is_built
from benchmarks.cases import AZURE_REQUESTS, WARM_UP, Case, azure_cases, has_trace
from benchmarks.measure import (
    RESULTS,
    Cost,
    Failed,
    facts_of_this_run,
    keep,
    measure,
    median,
    timed,
)

SHAPES: Final = ("1 replica", "8 replicas", "4P+4D")
TIMEOUT_S: Final = 900.0


def main() -> int:
    """Parse, run, print, keep."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="peers with this in their name")
    options = parser.parse_args()
    if not has_trace():
        raise SystemExit("the Azure trace is not in ../shared/data: nothing to compare on")
    peers = [peer for peer in read_peers(options.file) if options.only in peer["name"]]
    facts = {**facts_of_this_run(), "repeats": options.repeats}
    print(
        "| program | cluster | requests | requests/CPU-s | CPU s | wall s | peak MiB "
        "| emu's | compiled |"
    )
    print("|---" * 9 + "|")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="emu-peers-") as name:
        measure(WARM_UP, Path(name), compiled=BUILDS["pure"])
        if is_built():
            measure(WARM_UP, Path(name), compiled=BUILDS["compiled"])
        try:
            for peer in peers:
                row = in_turn(peer, options.repeats, Path(name))
                rows.append({**row, **facts})
                print(line_of(row), flush=True)
        finally:  # an interrupted call keeps what it has
            keep("peers", {"rows": [*other_rows(rows), *rows]})
    return 0


def read_peers(path: Path) -> list[dict[str, Any]]:
    """The file, checked: a mistake in it ends with one line."""
    try:
        peers: list[dict[str, Any]] = tomllib.loads(path.read_text()).get("peer", [])
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise SystemExit(f"{path}: {error}") from None
    if not peers:
        raise SystemExit(f"{path}: no [[peer]] in it")
    for peer in peers:
        for key in ("name", "shape", "requests", "command"):
            if key not in peer:
                raise SystemExit(f"{path}: peer {peer.get('name', '?')}: {key} is missing")
        if peer["shape"] not in SHAPES:
            raise SystemExit(f"{path}: {peer['name']}: shape is one of {', '.join(SHAPES)}")
        if not 1 <= peer["requests"] <= AZURE_REQUESTS:
            raise SystemExit(f"{path}: {peer['name']}: requests is 1 to {AZURE_REQUESTS}")
        peer["directory"] = str((path.parent / peer.get("directory", "")).resolve())
    return peers


def in_turn(peer: dict[str, Any], repeats: int, directory: Path) -> dict[str, Any]:
    """emu, peer, emu, peer ...; a peer that fails or takes too long is a row, too."""
    case = case_of(peer)
    ours: list[Cost] = []
    compiled: list[Cost] = []
    theirs: list[Cost] = []
    problem = ""
    for _ in range(repeats):
        ours.append(measure(case, directory, compiled=BUILDS["pure"]))
        if is_built():
            compiled.append(measure(case, directory, compiled=BUILDS["compiled"]))
        try:
            cwd = Path(peer["directory"])
            theirs.append(timed(peer["command"], cwd=cwd, timeout_s=TIMEOUT_S))
        except Failed as error:
            problem = str(error)
            break
    row = {key: peer[key] for key in ("name", "shape", "requests")}
    row |= {"notes": peer.get("notes", ""), "problem": problem, "emu": median(ours)._asdict()}
    if compiled:
        row["compiled"] = median(compiled)._asdict()
    return row | ({"peer": median(theirs)._asdict()} if theirs and not problem else {})


def case_of(peer: dict[str, Any]) -> Case:
    """What emu runs beside a peer."""
    return azure_cases(peer["requests"])[SHAPES.index(peer["shape"])]


def other_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What earlier calls kept and this one did not measure again."""
    path = RESULTS / "peers.json"
    return besides(rows, json.loads(path.read_text())["rows"]) if path.is_file() else []


def besides(rows: list[dict[str, Any]], kept: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows that were kept, of programs and cases that `rows` do not have."""
    new = {(row["name"], row["shape"], row["requests"]) for row in rows}
    return [row for row in kept if (row["name"], row["shape"], row["requests"]) not in new]


def line_of(row: dict[str, Any]) -> str:
    """One row of the table; the last columns are emu's rates in the same turns."""
    ours = " | ".join(
        f"{row['requests'] / row[build]['cpu_s']:,.0f}" if build in row else ""
        for build in ("emu", "compiled")
    )
    head = f"| {row['name']} | {row['shape']} | {row['requests']:,} "
    if "peer" not in row:
        return f"{head}| {row['problem']} | | | | {ours} |"
    peer = row["peer"]
    return (
        f"{head}| {row['requests'] / peer['cpu_s']:,.0f} | {peer['cpu_s']:.2f} "
        f"| {peer['wall_s']:.2f} | {peer['peak_mib']:,.0f} | {ours} |"
    )


if __name__ == "__main__":
    sys.exit(main())
