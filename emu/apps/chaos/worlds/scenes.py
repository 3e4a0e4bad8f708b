"""Worlds in which the rarest things are common: live loads, drains, spares not closed yet.

Four in ten of the wide worlds. Each is built around one scene that lasts, so that faults find a
replica in it: weights that arrive slowly while a helper shares the work, replicas that give their
requests away, spares that stand still. What a scene does not need is drawn as anywhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from emu.apps.chaos.worlds.drawing import Rng, Tables, by_arrival, chance, pick
from emu.apps.chaos.worlds.faults import fault_on
from emu.apps.chaos.worlds.policies import FCFS, HPA
from emu.apps.chaos.worlds.scaling import WITH_COPIES
from emu.config.schema import FcfsTable, LoadTable, VllmTable
from emu.config.tables import tag_of
from emu.documents import DocumentView
from emu.rng import rng_stream

SHARE: Final = 0.4
"""Of wide worlds."""
_AT_S: Final = (0.001, 0.02, 0.1, 0.3, 0.8)
_BENIGN: Final = (
    *("straggler", "freeze", "pause", "kv_shrink", "host_cache_lost"),
    *("link_down", "link_degrade", "link_latency", "partition"),
    *("transfer_refused", "transfer_broken", "transfer_hang", "completion_late"),
    *("completion_twice", "handshake_lost", "destination_refuses"),
)
"""Faults after which the replica that they struck is what it was."""
_OF_TRANSFERS: Final = (
    *("transfer_broken", "transfer_hang", "completion_late", "completion_twice"),
    *("handshake_lost", "handshake_lost"),
)
"""Faults of what a draining replica still sends; a handshake is short, so it comes twice."""
_LETHAL: Final = ("replica_crash", "replica_restart", "gpu_crash", "node_crash", "lease_expired")


class Scene:
    """A world in the making: what is where, and when what lasts goes on."""

    def __init__(self, rng: Rng, seed: int) -> None:
        self.rng = rng
        self.gpus = int(pick(rng, (1, 1, 2, 4)))
        self.groups: list[Tables] = []
        self.faults: list[Tables] = []
        self.lines: list[Tables] = []
        self.tables: Tables = {
            "seed": seed,
            "model": {"name": "meta-llama/Llama-3.1-8B"},
            "latency": {
                "backend": "linear",
                "base_us": float(pick(rng, (1000.0, 5000.0, 20000.0))),
                "per_token_us": float(pick(rng, (50.0, 100.0))),
                "per_context_token_us": float(pick(rng, (0.0, 0.1))),
            },
            "scheduler": {
                "policy": FCFS,
                "num_blocks": 4000,
                "request_token_budget": 4096,
            },
            "router": {"policy": tag_of(LoadTable)},
            "workload": {"oversized": "reject"},
            "recovery": {},
            "network": {"kv_transfer": pick(rng, ("layerwise", "blocking"))},
        }

    def replicas(self, **counts: int) -> list[list[int]]:
        """Replicas of these roles; their numbers, role by role."""
        first, found = 0, []
        for role, count in counts.items():
            self.groups.append({"role": role, "count": count})
            found.append(list(range(first, first + count)))
            first += count
        return found

    def machines(self, nic_gbps: Sequence[float], *, nvlink: float = 0.4) -> None:
        """Machines for all of them; `nvlink`: how often weights can go over it."""
        total = sum(group["count"] for group in self.groups)
        self.tables["replicas"] = self.groups
        self.tables["nodes"] = [
            {
                "count": -(-total // self.gpus),
                "gpus": self.gpus,
                "gpu": "A100-SXM4-80GB",
                "host_memory_gib": 64.0,
                "nic_gbps": float(pick(self.rng, nic_gbps)),
                **({"nvlink_gbps": 0.0} if not chance(self.rng, nvlink) else {}),
            }
        ]

    def requests(
        self, at_s: float, prompts: tuple[int, int], outputs: Sequence[int], count: int
    ) -> None:
        """So many requests at about this time."""
        for index in range(count):
            step_ns = 0 if chance(self.rng, 0.3) else int(pick(self.rng, (1000, 5_000_000)))
            self.lines.append(
                {
                    "arrival_time_ns": round(at_s * 1e9) + index * step_ns,
                    "input_toks": int(self.rng.integers(*prompts)),
                    "output_toks": int(pick(self.rng, outputs)),
                }
            )

    def strike(self, kind: str, replica: int, at_s: float, **what: Any) -> None:
        """A fault of this kind on a replica, in whatever way the kind names one."""
        others = [n for n in range(sum(group["count"] for group in self.groups)) if n != replica]
        fault = fault_on(
            self.rng, kind, round(at_s, 6), replica, others or [replica], gpus=self.gpus
        )
        if fault is not None:
            self.faults.append(fault | what)

    def benign(self, replicas: Sequence[int], span_s: tuple[float, float], count: int) -> None:
        """Faults that leave the scene standing."""
        least, most = span_s
        for _ in range(count):
            at_s = least + float(self.rng.random()) * (most - least)
            self.strike(pick(self.rng, _BENIGN), pick(self.rng, replicas), at_s)

    def hold_kv(self, at_s: float, lasts_s: float) -> None:
        """KV that is on its way for so long, so that a source has some to lose."""
        hang = {"at_s": at_s, "kind": "transfer_hang", "probability": 1.0, "duration_s": lasts_s}
        self.faults.append(hang)
        self.tables["recovery"]["transfer_timeout_ms"] = 2000.0


def draw_rare(seed: int) -> tuple[Tables, list[Tables], list[Tables]] | None:
    """The tables, lines and faults of a scene; None for most seeds."""
    rng = rng_stream(seed, "chaos rare")
    if not chance(rng, SHARE):
        return None
    scene = Scene(rng, seed)
    pick(rng, _SCENES)(scene)
    return (
        scene.tables,
        by_arrival(scene.lines),
        sorted(scene.faults, key=lambda fault: fault["at_s"]),
    )


def _live(scene: Scene) -> None:
    """Prompts pile up, and replicas serve while their weights arrive."""
    rng = scene.rng
    prefill, _, idle = scene.replicas(
        prefill=int(pick(rng, (1, 1, 2, 3))),
        decode=int(pick(rng, (1, 2, 3))),
        inactive=int(pick(rng, (1, 1, 2, 3))),
    )
    scene.machines((25.0, 50.0, 100.0, 100.0), nvlink=0.1)
    begin_s = 0.05
    scene.requests(begin_s, (300, 2000), (1, 2, 20), int(rng.integers(20, 40)))
    if chance(rng, 0.7):
        scene.requests(float(pick(rng, (0.8, 2.0))), (100, 2000), (1, 5, 40), 10)
    scene.tables["autoscale"] = {
        "executor": "blitz",
        "live": True,
        "multicast": pick(rng, ("chain", "chain", "p2p", "tanz")),
        "mutate": chance(rng, 0.3),
        "loader": pick(rng, ("host", "cache")),
        "prefill_lower_s": 0.05,
        "prefill_upper_s": 0.1,
        "max_prefill": int(pick(rng, (2, 64))),
        "max_decode": int(pick(rng, (1, 64))),
        "min_decode": 1,
        "spare_ttl_ms": float(pick(rng, (100.0, 2000.0))),
    }
    # What is on no machine's memory comes from a disk, which takes thirteen seconds.
    deadlines_s = (0.8, 60.0) if scene.tables["autoscale"]["loader"] == "host" else (60.0,)
    scene.tables["recovery"] = {"load_deadline_s": pick(rng, deadlines_s)}
    new, old = idle[-1:] * 2 + idle[:1], prefill[:1] * 2 + prefill
    span_s = (begin_s + 0.01, begin_s + float(pick(rng, (0.2, 0.6, 1.2))))
    scene.benign([*new, *old], span_s, int(rng.integers(5, 13)))
    for at_s in (begin_s + float(pick(rng, _AT_S)), span_s[1]):
        kind = pick(rng, (*_LETHAL, "load_stuck"))
        part, its = pick(
            rng, (("new_prefill", new), ("old_prefill", old), ("refractory_prefill", new))
        )
        if kind == "replica_crash" and chance(rng, 0.7):
            after_s = float(pick(rng, (0.0, 0.0, 0.01, 0.1)))
            lasts = {"duration_s": 0.5} if chance(rng, 0.7) else {}
            crash = {"at_s": 0.0, "kind": kind, "stage": part, "after_s": after_s}
            scene.faults.append(crash | lasts)
        elif kind == "load_stuck":
            scene.strike(kind, new[0], 0.0)
        else:
            if kind == "lease_expired":
                refusal = {"at_s": at_s / 2, "kind": "destination_refuses", "duration_s": at_s}
                scene.faults.append(refusal)
            scene.strike(kind, pick(rng, its), at_s)


def _held(scene: Scene) -> None:
    """One live load after the other on the same two replicas, which faults strike all the time."""
    rng = scene.rng
    scene.gpus = int(pick(rng, (1, 1, 2)))
    decodes, idles = int(pick(rng, (1, 2))), int(pick(rng, (1, 2)))
    (old,), decode, idle = scene.replicas(prefill=1, decode=decodes, inactive=idles)
    new = idle[-1]
    scene.machines((25.0, 50.0, 100.0), nvlink=0.0)
    begin_s = 0.05
    has_leases = chance(rng, 0.35)
    if has_leases:  # small batches, of which halves soon wait at both
        scene.tables["scheduler"]["request_token_budget"] = 600
        scene.requests(begin_s, (200, 500), (2, 20), 60)
    else:
        scene.requests(begin_s, (1000, 2500), (1, 2, 20), int(rng.integers(30, 60)))
    scene.tables["autoscale"] = {
        "executor": "blitz",
        "live": True,
        "multicast": pick(rng, ("chain", "p2p", "tanz")),
        "prefill_lower_s": 0.05,
        "prefill_upper_s": 0.1,
        "max_prefill": int(pick(rng, (2, 64))),
        "min_decode": decodes,
    }
    scene.tables["recovery"] = {"load_deadline_s": 60.0, "restart_s": 0.1}
    if has_leases:
        # Decode replicas have no memory for a while, so that KV waits at both.
        for replica in decode:
            scene.strike("kv_shrink", replica, begin_s, part=0.99, duration_s=3.0)
        for index in range(12):
            scene.strike("lease_expired", (old, new)[index % 2], begin_s + 0.15 * (index + 2))
    if chance(rng, 0.15):
        scene.strike("load_stuck", new, begin_s, duration_s=0.05, probability=1.0)
        scene.tables["recovery"]["load_deadline_s"] = 8.0
    if chance(rng, 0.45):
        crash = {"at_s": 0.0, "kind": "replica_crash", "stage": "refractory_prefill"}
        scene.faults.append(crash | {"duration_s": 0.3})
    at_s = begin_s + (2.0 if has_leases else 0.02)
    for _ in range(2):
        calm_s = float(pick(rng, (0.3, 0.6)))
        scene.benign((old, new), (at_s, at_s + calm_s), int(rng.integers(4, 9)))
        at_s += calm_s
        kind = pick(rng, ("replica_crash", "replica_restart", "gpu_crash", "node_crash"))
        if kind == "replica_crash":
            stage = pick(rng, ("new_prefill", "old_prefill"))
            crash = {"at_s": round(at_s, 6), "kind": kind, "stage": stage, "duration_s": 0.2}
            scene.faults.append(crash)
        else:
            scene.strike(kind, pick(rng, (old, new)), at_s)
        at_s += 0.5  # it is back, and the next load has begun


def _instants(scene: Scene) -> None:
    """Replicas change their part by hand, and crash in states that last but an instant."""
    rng = scene.rng
    prefill, decode, idle = scene.replicas(
        prefill=int(rng.integers(2, 4)), decode=int(rng.integers(2, 4)), inactive=2
    )
    scene.machines((10.0, 25.0, 100.0))
    scene.requests(0.0, (200, 800), (60, 120), int(rng.integers(20, 40)))
    scene.tables["latency"]["base_us"] = float(pick(rng, (5000.0, 20000.0)))
    commands: list[Tables] = []
    for replica in (*prefill[1:], *decode[1:], *idle):
        at_s = float(pick(rng, (0.1, 0.3, 0.5)))
        words = ("deactivate",) if replica in decode else ("to_decode", "to_decode", "to_prefill")
        word = "to_decode" if replica in prefill else pick(rng, words)
        commands.append({"at_s": at_s, "replica": replica, "command": word})
        if replica in decode:
            later_s = at_s + float(pick(rng, (0.001, 0.01, 0.05)))
            commands.append({"at_s": later_s, "replica": replica, "command": "to_decode"})
    scene.tables["commands"] = commands
    for stage in ("mutating_to_decode", "aus_decode", "aus_decode", "shutting_decode"):
        if chance(rng, 0.6):
            crash = {"at_s": float(pick(rng, (0.0, 0.0, 0.07))), "kind": "replica_crash"}
            scene.faults.append(crash | {"stage": stage, "duration_s": 0.3})


def _drains(scene: Scene) -> None:
    """Replicas are told to leave while they have much to do, and some to come back."""
    rng = scene.rng
    is_split, prefill = chance(rng, 0.75), list[int]()
    if is_split:
        prefill, decode = scene.replicas(prefill=int(rng.integers(2, 5)), decode=3)
        leaving = [*prefill[1:], *decode[1:]]
        back = dict.fromkeys(prefill, "to_prefill") | dict.fromkeys(decode, "to_decode")
    else:
        (leaving,) = scene.replicas(colocated=int(rng.integers(2, 5)))
        leaving = leaving[1:]
        back = dict.fromkeys(leaving, "to_colocated")
    scene.machines((5.0, 10.0, 25.0))
    kinds = (FcfsTable, VllmTable)
    scene.tables["scheduler"]["policy"] = policy = pick(rng, tuple(tag_of(kind) for kind in kinds))
    if policy == "vllm":
        del scene.tables["scheduler"]["request_token_budget"]
    scene.requests(0.0, (200, 1500), (20, 60, 120), int(rng.integers(12, 30)))
    if is_split:
        scene.tables["migration"] = {"drain": chance(rng, 0.4)}
    scene.tables["recovery"] |= {"drain_grace_s": float(pick(rng, (0.0, 0.0, 0.3)))}
    commands: list[Tables] = []
    for replica in leaving:
        at_s = float(pick(rng, (0.05, 0.1, 0.3, 0.5)))
        commands.append({"at_s": at_s, "replica": replica, "command": "deactivate"})
        if chance(rng, 0.6):
            later_s = at_s + float(pick(rng, (0.01, 0.05, 0.3, 1.0)))
            commands.append({"at_s": later_s, "replica": replica, "command": back[replica]})
        span_s = (at_s + 0.001, at_s + float(pick(rng, (0.05, 0.2))))
        scene.benign([replica], span_s, int(rng.integers(3, 7)))
        if replica in prefill:
            for kind in (pick(rng, _OF_TRANSFERS), pick(rng, _OF_TRANSFERS)):
                scene.strike(kind, replica, at_s, duration_s=0.3)
            # Stages of a transfer that are seldom met while a replica drains.
            for kind in ("completion_late", "completion_twice", "transfer_refused"):
                if chance(rng, 0.2):
                    scene.strike(kind, replica, at_s, duration_s=0.3)
    scene.tables["commands"] = commands
    for replica in leaving[:2] if chance(rng, 0.5) else leaving[-2:]:
        kind = pick(rng, (*_LETHAL, *_LETHAL, "drain_expired", "host_cache_lost"))
        told_s = next(c["at_s"] for c in commands if c["replica"] == replica)
        at_s = told_s + float(pick(rng, (0.001, 0.01, 0.03, 0.1)))
        if replica in prefill and chance(rng, 0.4):
            kind = "lease_expired"
            scene.hold_kv(max(0.0, told_s - 0.2), 1.0)
            for later_s in (0.05, 0.2, 0.5):
                scene.strike(kind, replica, told_s + later_s)
        if is_split or kind not in ("lease_expired", "drain_expired"):
            scene.strike(kind, replica, at_s)


def _spares(scene: Scene) -> None:
    """Decode replicas that stand still become spares, and are wanted before they go on."""
    rng = scene.rng
    scene.gpus = 1
    _, decode = scene.replicas(prefill=1, decode=2)
    scene.machines((100.0,))
    for_decode = chance(rng, 0.35)
    length, outputs = ((400, 600), (100,)) if for_decode else ((1500, 2500), (1, 2))
    scene.requests(0.5, length, outputs, 40)
    if for_decode:
        scene.tables["scheduler"]["num_blocks"] = 300
    bounds: DocumentView = {"max_prefill": 2, "max_decode": 1, "prefill_lower_s": 0.05}
    if for_decode:
        bounds = {"max_prefill": 1, "decode_lower": 0.1, "decode_upper": 0.2}
    ttl_ms = 60_000.0
    scene.tables["latency"] |= {"base_us": 2000.0, "per_token_us": 50.0}
    scene.tables["autoscale"] = {
        "executor": "blitz", "mutate": False, "spare_ttl_ms": ttl_ms, **bounds
    }  # fmt: skip
    lasts_s = float(pick(rng, (0.6, 1.0, 1.5)))
    for replica in decode:
        scene.faults.append(
            {"at_s": 0.0, "kind": "pause", "replica": replica, "duration_s": lasts_s}
        )
    if chance(rng, 0.4):
        stage = "aus_prefill" if not for_decode else "decode"
        scene.faults.append(
            {"at_s": 0.4, "kind": "replica_crash", "stage": stage, "duration_s": 0.5}
        )
    scene.tables["recovery"] = {"progress_deadline_ms": 5000.0}


def _loads(scene: Scene) -> None:
    """Loads that stop the world, cut short or late."""
    rng = scene.rng
    is_pool = chance(rng, 0.35)
    if is_pool:
        serving, idle = scene.replicas(colocated=1, inactive=3)
        scaling: Tables = {
            "planner": HPA, "metric": "concurrency", "target_value": 4.0, "tick_ms": 20.0,
            "executor": "serverless", "loader": pick(rng, ("disk", "host")),
            "scale_down_stabilization_s": 0.5,
        }  # fmt: skip
    else:
        serving, _, idle = scene.replicas(prefill=1, decode=1, inactive=3)
        scaling = {
            "executor": "blitz", "live": False, "loader": pick(rng, ("host", "disk")),
            "multicast": pick(rng, ("chain", "p2p", "none")), "decode_upper": 0.1,
            "decode_lower": 0.02, "prefill_lower_s": 0.05, "prefill_upper_s": 0.1,
        }  # fmt: skip
        scene.tables["scheduler"]["num_blocks"] = 800
    scene.machines((25.0, 100.0))
    scene.tables["autoscale"] = scaling
    scene.requests(0.05, (300, 1500), (20, 60), int(rng.integers(12, 30)))
    # A disk takes thirteen seconds; what is given up for good would be tried again for ever.
    deadlines_s = (60.0,) if scaling["loader"] == "disk" else (0.8, 60.0)
    scene.tables["recovery"] = {"load_deadline_s": pick(rng, deadlines_s)}
    scene.benign([*idle, *idle, *serving], (0.06, float(pick(rng, (0.2, 1.0)))), 6)
    kinds = ("replica_crash", "replica_restart", "gpu_crash", "gpu_crash", "node_crash")
    for kind in (pick(rng, kinds), pick(rng, (*kinds, "load_stuck"))):
        scene.strike(kind, pick(rng, idle), 0.05 + float(pick(rng, _AT_S)))


def _copies(scene: Scene) -> None:
    """Bursts with pauses: copies of weights in the memory of machines are there, or have gone."""
    rng = scene.rng
    scene.gpus = 1
    scene.replicas(colocated=1, inactive=int(pick(rng, (1, 2, 3))))
    scene.machines((100.0,))
    scene.tables["autoscale"] = WITH_COPIES | {
        "metric": pick(rng, ("concurrency", "queue")),
        "host_cache_ttl_s": float(pick(rng, (0.2, 1.0, 3.0))),
        "scale_up_stabilization_s": float(pick(rng, (0.0, 0.1))),
        "scale_down_stabilization_s": float(pick(rng, (0.1, 0.5))),
    }
    at_s = 0.05  # a disk takes thirteen seconds
    for pause_s in (0.0, 14.5, *(float(pick(rng, (1.0, 2.0, 5.0))) for _ in range(3))):
        at_s += pause_s
        scene.requests(at_s, (100, 800), (20, 60), int(rng.integers(6, 14)))
    scene.tables["recovery"] = {"load_deadline_s": 60.0, "client_retries": 0}
    if chance(rng, 0.3):
        scene.strike("host_cache_lost", 1, 15.0)


def _stages(scene: Scene) -> None:
    """Pipelines of which one replica is slow, or stands still, for a while."""
    rng = scene.rng
    scene.gpus = int(pick(rng, (2, 4)))
    scene.replicas(colocated=2)
    scene.groups[0]["pipeline_parallel"] = stages = int(pick(rng, (2, 4)))
    scene.machines((50.0,))
    scene.tables["nodes"][0]["count"] = -(-2 * stages // scene.gpus)
    scene.tables["scheduler"] = {"policy": "vllm", "num_blocks": 2000, "max_num_seqs": 8}
    scene.requests(0.0, (100, 600), (20, 60), 16)
    for at_s in (0.05, 0.1, 0.3):
        kind = pick(rng, ("straggler", "straggler", "pause", "partition"))
        scene.strike(kind, int(rng.integers(2)), at_s)


def _links(scene: Scene) -> None:
    """KV over links that several faults slow at once."""
    rng = scene.rng
    prefill, decode = scene.replicas(prefill=2, decode=2)
    scene.machines((25.0, 100.0), nvlink=0.2)
    scene.requests(0.0, (200, 1500), (2, 20), int(rng.integers(16, 30)))
    for kind in ("link_latency", pick(rng, ("link_latency", "link_degrade", "link_down"))):
        replica = pick(rng, (*prefill, *decode))
        for at_s, lasts_s in ((0.01, 1.5), (0.1, 0.8), (0.2, 2.0)):
            scene.strike(kind, replica, at_s, duration_s=lasts_s if kind != "link_down" else 0.05)
    scene.tables["recovery"] = {"transfer_timeout_ms": 5000.0}


_SCENES: Final[Sequence[Callable[[Scene], None]]] = (
    *[_live] * 4,
    *[_held] * 10,
    *[_instants] * 4,
    *[_drains] * 9,
    *[_loads] * 4,
    *[_spares] * 5,
    _copies,
    *[_stages] * 2,
    *[_links] * 2,
)
