"""Nothing writes to another actor's object, and private names stay in their file: read off the code.

Every assignment, deletion and call of a mutating method in `emu/` whose target is a field of
something else than `self` is looked at. `OWNED` gives, for the fields of the objects that actors own,
where they may be written: the file of the class, and the places that hold the object. Fields are
told apart by name, so a name that several classes use is judged by the widest of them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.sources import nodes, parsed

ROOT = Path(__file__).resolve().parents[1] / "emu"
MUTATING = frozenset(
    [
        "append",
        "appendleft",
        "remove",
        "pop",
        "popleft",
        "clear",
        "update",
        "add",
        "discard",
        "extend",
        "insert",
        "setdefault",
    ]
)
HOLDERS = (
    "request.py",
    "cluster/dispatch.py",
    "cluster/gateway.py",
    "replica/",
    "scheduling/",
    "kv/",
    "lab/parity",
)
"""What holds a request writes to it: the gateway, then a replica and its scheduler and pool (the
comparison with another simulator has requests of its own)."""
BEFORE_ARRIVAL = ("workload/", "apps/serve/")
"""What makes requests, before they arrive."""
REQUEST: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("status", "holder_id", "reason", "queued_ns", "taken_ns"), HOLDERS),
    **dict.fromkeys(("retries", "migrations", "migration_ns"), ("request.py",)),
    **dict.fromkeys(("computed_tokens", "kv_blocks", "held", "preemptions"), HOLDERS),
    **dict.fromkeys(("generated_tokens", "first_token_ns", "last_token_ns"), HOLDERS),
    **dict.fromkeys(("recomputed_tokens", "replica_id", "decode_replica_id"), HOLDERS),
}
OWNERS = {
    "Replica": ("replica/replica.py", ("replica/",)),
    "Outbound": ("migration/outbound.py", ("migration/outbound.py",)),
    "LiveMove": ("migration/live_move.py", ("migration/live_move.py",)),
    "LiveMigrator": ("migration/live.py", ("migration/live.py",)),
    "Watcher": ("migration/watcher.py", ("migration/watcher.py",)),
    "Injector": ("faults/injector.py", ("faults/injector.py",)),
    "Recovery": ("faults/recovery.py", ("faults/recovery.py",)),
    "Gateway": ("cluster/gateway.py", ("cluster/gateway.py",)),
    "Cluster": ("cluster/cluster.py", ("cluster/cluster.py",)),
    "Scaler": ("autoscale/scaler.py", ("autoscale/scaler.py",)),
    "Carrier": ("network/carrier.py", ("network/",)),
    "Kernel": ("kernel/clock.py", ("kernel/",)),
    "RelayBoard": ("replica/relay_board.py", ("replica/relay_board.py",)),
    "WaveGroup": ("replica/wave.py", ("replica/wave.py",)),
    "Prerequisites": ("replica/prerequisites.py", ("replica/",)),
    "Counters": ("replica/counters.py", ("replica/", "cluster/build.py")),
    "Pace": ("replica/pace.py", ("replica/pace.py", "replica/replica.py")),
    "Watch": ("replica/watch.py", ("replica/watch.py", "replica/replica.py", "replica/inbound.py")),
    "Books": ("replica/books.py", ("replica/", "cluster/build.py")),
    **{
        name: (f"replica/flight/{name.lower()}.py", (f"replica/flight/{name.lower()}.py",))
        for name in ("Step", "Run", "Awaiting", "Measured", "Layered", "Relay")
    },
    "Staged": ("replica/flight/staged.py", ("replica/flight/staged.py", "replica/replica.py")),
    "Member": (
        "replica/flight/member.py",
        ("replica/flight/member.py", "replica/wave.py", "replica/replica.py"),
    ),
    "Idle": ("replica/flight/base.py", ("replica/flight/", "replica/actor.py")),
    "LayerScheduler": ("replica/layer_scheduler.py", ("replica/",)),
    "ReplicaActor": ("replica/actor.py", ("replica/actor.py",)),
    "KvRejecter": ("autoscale/kv_reject.py", ("autoscale/kv_reject.py",)),
    "HostCache": ("autoscale/host_cache.py", ("autoscale/host_cache.py",)),
    "Sight": ("autoscale/sight.py", ("autoscale/sight.py",)),
    "Dispatch": ("cluster/dispatch.py", ("cluster/dispatch.py",)),
    "Recorder": ("cluster/recorder.py", ("cluster/recorder.py",)),
    "GpuSharing": ("cluster/gpu_sharing.py", ("cluster/gpu_sharing.py",)),
    "TierBook": ("cluster/tier_book.py", ("cluster/tier_book.py",)),
    "Lock": ("kernel/lock.py", ("kernel/lock.py",)),
    "LinkFaults": ("faults/link_faults.py", ("faults/link_faults.py",)),
    "TransferFaults": ("faults/transfer_faults.py", ("faults/transfer_faults.py",)),
}
SPLIT_FIELDS = (
    *("first_id", "second_id", "destination_id", "reserved", "survivors"),
    *("is_first_done", "is_second_done", "is_dropped"),
)
PRIVATE_OF_OTHERS = {"_replace", "_exit", "_actions", "_run_exitfuncs", "_flash_attention_forward"}
"""Private or odd names of the standard library and of torch, not of emu."""


class Write(NamedTuple):
    """A field of something else than `self` that is written."""

    file: str
    line: int
    holder: str
    """The expression whose field it is."""
    field: str


def class_fields(file: str, name: str) -> set[str]:
    """Fields that a class gives itself."""
    for node in nodes(ROOT / file):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return {
                target.attr
                for inner in ast.walk(node)
                for target in targets_of(inner)
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"
            }
    return set()


def targets_of(node: ast.AST) -> Iterator[ast.expr]:
    """What a statement or a mutating call writes to."""
    found: list[ast.expr] = []
    if isinstance(node, ast.Assign | ast.Delete):
        found = node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        found = [node.target]
    elif (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in MUTATING
        and isinstance(node.func.value, ast.Attribute | ast.Subscript)
    ):
        found = [node.func.value]
    for target in found:
        parts = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
        for part in parts:
            while isinstance(part, ast.Subscript | ast.Starred):
                part = part.value
            yield part


def writes() -> list[Write]:
    """All of them, but for fields of objects that the same function has just made."""
    found = set()
    for path in sorted(ROOT.rglob("*.py")):
        file = str(path.relative_to(ROOT))
        if file.startswith("testing/"):
            continue  # a bench does by hand what owners do
        for function in nodes(path):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            made = {
                target.id
                for node in ast.walk(function)
                if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
                for target in node.targets
                if isinstance(target, ast.Name)
                and ast.unparse(node.value.func).rpartition(".")[2][:1].isupper()
            }
            for node in ast.walk(function):
                for target in targets_of(node):
                    if not isinstance(target, ast.Attribute):
                        continue
                    holder = ast.unparse(target.value)
                    if holder not in {"self", "cls", *made}:
                        found.add(Write(file, target.lineno, holder, target.attr))
    return sorted(found)


WRITES = writes()


def strangers(field: str, places: tuple[str, ...]) -> list[str]:
    return [
        f"{w.file}:{w.line}: {w.holder}.{w.field}"
        for w in WRITES
        if w.field == field and not w.file.startswith(places)
    ]


def test_the_walk_sees_writes() -> None:
    """It would be silent about everything if it found nothing."""
    assert len(WRITES) > 300
    assert any(w.file == "migration/outbound.py" and w.field == "is_dropped" for w in WRITES)


@pytest.mark.parametrize("field", REQUEST)
def test_requests_are_written_by_what_holds_them(field: str) -> None:
    is_theirs = ("request", "r", "one", "victim", "clone")
    found = strangers(field, (*REQUEST[field], *BEFORE_ARRIVAL))
    assert [w for w in found if w.rpartition(" ")[2].partition(".")[0] in is_theirs] == []


@pytest.mark.parametrize("name", OWNERS)
def test_an_actors_object_is_written_by_itself(name: str) -> None:
    """Its fields are written in its own file (or package), whatever the variable is called there."""
    file, places = OWNERS[name]
    fields = class_fields(file, name)
    assert fields, f"{name} is not in {file}"
    variable = {
        "WaveGroup": ("wave",),
        "Prerequisites": ("prerequisites",),
        "LayerScheduler": ("layers", "layer_scheduler"),
        "ReplicaActor": ("actor",),
        "Idle": ("flight",),
        "KvRejecter": ("rejecter",),
        "HostCache": ("cache",),
        "LinkFaults": ("links",),
        "TransferFaults": ("transfers",),
        "GpuSharing": ("sharing",),
        "TierBook": ("tiers",),
        "Replica": ("replica", "source", "destination", "old", "other", "spare"),
        "Kernel": ("kernel",),
        "Carrier": ("carrier", "network"),
    }.get(name, (name.lower(), "machine", "moving.move", "live", "board", "relay", "scaler"))
    found = [
        f"{w.file}:{w.line}: {w.holder}.{w.field}"
        for w in WRITES
        if w.field in fields
        and not w.file.startswith(places)
        and w.holder.rpartition(".")[2] in variable
    ]
    assert found == []


@pytest.mark.parametrize("field", SPLIT_FIELDS)
def test_a_split_batch_is_written_by_the_machine_that_owns_it(field: str) -> None:
    found = [w for w in strangers(field, ("migration/outbound.py",)) if "split" in w]
    assert found == []


def test_private_names_stay_in_their_file() -> None:
    found: list[str] = []
    for path in sorted(ROOT.rglob("*.py")):
        tree = parsed(path)
        own = {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls")
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                own.add(node.target.id)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                own.add(node.value)  # slots
        found += [
            f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and node.attr.startswith("_")
            and not node.attr.startswith("__")
            and node.attr not in own | PRIVATE_OF_OTHERS
        ]
    assert found == []


def test_private_names_are_not_imported() -> None:
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("emu"):
                found += [
                    f"{path.relative_to(ROOT)}:{node.lineno}: {alias.name}"
                    for alias in node.names
                    if alias.name.startswith("_") and not alias.name.startswith("__")
                ]
    assert found == []


# --- schedulers -----------------------------------------------------------------------------------
CHANGES_SCHEDULER = frozenset(
    [
        *("enqueue", "schedule", "complete", "split", "turn", "resume", "run_on", "reserve"),
        *("unreserve", "activate", "adopt", "detach", "release", "cancel", "evacuate", "hand_out"),
        *("drop", "drop_unschedulable", "take_over", "pull", "lose", "restore"),
    ]
)
"""Methods of schedulers and their ledgers, and functions of `layer_batches`, that change their books."""


def scheduler_changes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, whose scheduler) of each call that changes one."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        named: dict[str, str] = {}
        for node in ast.walk(function):
            if isinstance(node, ast.Assign):
                pairs = [(node.targets[0], node.value)]
                if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = list(zip(node.targets[0].elts, node.value.elts, strict=True))
                for target, value in pairs:
                    if ast.unparse(value).endswith(".scheduler"):
                        named[ast.unparse(target)] = ast.unparse(value)
        for node in ast.walk(function):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr not in CHANGES_SCHEDULER:
                continue
            whose = ast.unparse(node.func.value).removesuffix(".ledger")
            if whose == "layer_batches":
                whose = ast.unparse(node.args[0])
            whose = named.get(whose, whose)
            if whose.endswith("scheduler"):
                yield node.lineno, whose


@pytest.mark.parametrize("package", ["replica", "migration", "faults", "autoscale", "cluster"])
def test_a_scheduler_is_changed_by_its_own_replica_alone(package: str) -> None:
    """A helper takes a batch over when it is asked; other packages change no scheduler at all."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: {whose}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for line, whose in scheduler_changes(parsed(path))
    ]
    own = [
        one
        for one in found
        if one.endswith((" replica.scheduler", " self.scheduler", "books.scheduler"))
    ]
    assert [one for one in found if one not in own] == []
    assert bool(own) == (package == "replica")


def test_a_change_of_anothers_scheduler_is_seen() -> None:
    text = (
        "def give(one, old):\n    mine, its = one.scheduler, old.scheduler\n    its.cancel(one)\n"
    )
    text += "    layer_batches.take_over(old.scheduler, [])\n    old.scheduler.ledger.lose(1, 2)\n"
    found = [whose for _, whose in scheduler_changes(ast.parse(text))]
    assert found == ["old.scheduler"] * 3
