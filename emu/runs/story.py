"""`emu story`: what a replica was doing at an instant and why, or the test that brings it there."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import msgspec

from emu.cluster.standing import Standing
from emu.documents import DocumentView
from emu.errors import InputError
from emu.runs.moment import Moment
from emu.units import NS_PER_MS, NS_PER_S

_IDS_MAX: Final = 12


def story_command(
    run: Path, replica: int, at: str, *, as_test: bool, plugins: bool, as_json: bool
) -> int:
    """The command; exit status 0. Raises InputError for a moment that the run does not have."""
    standing = Moment(run, _instant_s(at), plugins=plugins).replica(replica)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(standing)).decode())
    elif as_test:
        print(test_text(run, standing, plugins=plugins), end="")
    else:
        print("\n".join(story_lines(standing)))
    return 0


def _instant_s(given: str) -> float:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(s|ms|ns)", given)
    if match is None:
        raise InputError("emu story", None, "--at", f"{given!r} needs a unit: 12.4s or 300ms")
    units = {"s": NS_PER_S, "ms": NS_PER_MS, "ns": 1}
    return float(match[1]) * units[match[2]] / NS_PER_S


def story_lines(standing: Standing) -> list[str]:
    """What it was doing and why, line by line."""
    at_s = _seconds(standing.at_ns)
    lines = [
        f"replica {standing.replica} at {at_s}",
        f"  {standing.state} since {_seconds(standing.since_ns)} ({standing.cause})",
        f"  {_doing(standing)}",
        f"  running {_ids(standing.running)}; waiting {_ids(standing.waiting)}",
        f"  {standing.kv_blocks_used:,} of {standing.kv_blocks_total:,} KV blocks used; "
        f"{standing.prefill_tokens:,} prompt and {standing.decode_tokens:,} output tokens so far",
    ]
    if standing.transitions:
        lines.append("its changes of state")
        lines += [f"  {_dated(line)}" for line in standing.transitions]
    if standing.last:
        lines.append("what happened to it last")
        lines += [f"  {_seconds(one['at_ns'])} {_told(one)}" for one in standing.last]
    return lines


def test_text(run: Path, standing: Standing, *, plugins: bool = False) -> str:
    """A test, for pytest, that brings the replica to that moment; what was allowed stays so."""
    allowed = ", plugins=True" if plugins else ""
    at_s = standing.at_ns / 1e9
    name = re.sub(r"\W+", "_", f"replica_{standing.replica}_at_{at_s:g}_s")
    claims = {
        "state": standing.state,
        "flight": standing.flight,
        "step_ends_ns": standing.step_ends_ns,
        "running": standing.running,
        "waiting": standing.waiting,
        "kv_blocks_used": standing.kv_blocks_used,
    }
    return "\n".join(
        [
            "from emu.testing import Moment",
            "",
            "",
            f"def test_{name}() -> None:",
            f"    moment = Moment({str(run)!r}, at_s={at_s!r}{allowed})",
            f"    replica = moment.replica({standing.replica})",
            *(f"    assert replica.{key} == {value!r}" for key, value in claims.items()),
            "",
        ]
    )


def _doing(standing: Standing) -> str:
    doing = f"in flight: {standing.doing}"
    if standing.step_ends_ns >= 0:
        doing += f"; the iteration in flight ends at {_seconds(standing.step_ends_ns)}"
    if standing.is_paused and "stands still" not in standing.doing:
        doing += "; the process stands still"
    return doing


def _seconds(at_ns: int) -> str:
    return f"{at_ns / 1e9:.6f} s"


def _dated(line: str) -> str:
    at_ns, _, what = line.partition(" ")
    return f"{_seconds(int(at_ns))} {what}"


def _ids(ids: Iterable[int]) -> str:
    found = list(ids)
    shown = ", ".join(str(one) for one in found[:_IDS_MAX])
    more = f" and {len(found) - _IDS_MAX} more" if len(found) > _IDS_MAX else ""
    return f"{len(found)} ({shown}{more})" if found else "none"


def _told(record: DocumentView) -> str:
    if record["event"] == "tokens":
        each = len(record["ends"])
        return f"{each} token{'s' * (each > 1)} for each of {_ids(record['rows'])}"
    fields = {key: value for key, value in record.items() if key not in ("at_ns", "event")}
    told = ", ".join(f"{key} {_short(value)}" for key, value in fields.items())
    return f"{record['event']}: {told}"


def _short(value: Any) -> str:
    if isinstance(value, list) and len(value) > _IDS_MAX:
        return f"[{len(value)} of them]"
    return str(value)
