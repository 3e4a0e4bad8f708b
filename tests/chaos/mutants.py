"""Planted bugs that the campaign must catch.

    python -m tests.chaos.mutants [--seeds 1000] [--jobs 2] [--only NAME]

Each mutant is one change of one file of a copy of the program; the swarm runs against the copy until
a seed fails. The canary (a request that is dropped without an end) must always be caught: it shows
that the harness can report at all. A change whose text is not found is an error, never a pass.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Mutant(NamedTuple):
    """One planted bug."""

    name: str
    file: str
    old: str
    new: str


MUTANTS = (
    Mutant(
        "canary: a request ends without a notice",
        "emu/cluster/gateway.py",
        "        self._on_terminal(request)\n        if status is _REJECTED",
        "        if request.request_id % 5 == 3:\n            return\n"
        "        self._on_terminal(request)\n        if status is _REJECTED",
    ),
    Mutant(
        "a crash forgets batches that had arrived",
        "emu/replica/crash.py",
        "                lost.append(request)\n",
        "                pass\n",
    ),
    Mutant(
        "a crash forgets pending cancellations",
        "emu/replica/crash.py",
        "            replica.out.append(End(event.request, event.status, event.reason))\n",
        "            pass\n",
    ),
    Mutant(
        "a crash does not complete the leap",
        "emu/replica/flight/run.py",
        "        return self._alone().lose()\n",
        "        return Step(self.books, self.batch, self.start_ns, self.due_ns).lose()\n",
    ),
    Mutant(
        "a paused replica goes on",
        "emu/replica/crash.py",
        "    replica.paused_ns = replica.clock.now_ns\n",
        "    replica.paused_ns = -1\n",
    ),
    Mutant(
        "lost requests are not routed again",
        "emu/faults/recovery.py",
        "            gateway.route(request)\n",
        "            pass\n",
    ),
    Mutant(
        "a lost request counts its last token again",
        "emu/faults/recovery.py",
        "            request.start_again(is_retry=has_begun)\n",
        "            request.start_again(is_retry=has_begun)\n"
        "            request.generated_tokens = max(0, request.generated_tokens - 1)\n",
    ),
    Mutant(
        "the source's queue survives a crash",
        "emu/faults/recovery.py",
        "        if watcher is not None:\n            lost += watcher.lose_source()\n"
        "        if cluster.live",
        "        if cluster.live",
    ),
    Mutant(
        "other watchers do not hear of a crash",
        "emu/faults/recovery.py",
        "                other.tell(DestinationLost(replica.replica_id))\n",
        "                pass\n",
    ),
    Mutant(
        "a finished transfer does not release the source",
        "emu/migration/watcher.py",
        "        source.actor.tell(Released(requests=batch.requests))\n",
        "",
    ),
    Mutant(
        "a finished transfer keeps the lock",
        "emu/migration/watcher.py",
        "        destination.lock.release(self.name)\n        self.world.on_transfer(",
        "        self.world.on_transfer(",
    ),
    Mutant(
        "the destination opens before the delivery, and keeps what clients left",
        "emu/migration/watcher.py",
        "            destination.actor.tell(Unreserved(requests=[request]))\n",
        "            pass\n",
    ),
    Mutant(
        "a second notice of an end counts again",
        "emu/migration/outbound.py",
        "    Kind.TRANSFER_DONE: (ignore, ignore, ignore, transfer_done),\n",
        "    Kind.TRANSFER_DONE: (transfer_done, transfer_done, transfer_done, transfer_done),\n",
    ),
    Mutant(
        "a failed transfer keeps the reservation",
        "emu/migration/outbound.py",
        "        self.out += (Unreserve(destination_id, batch.requests), Unlock(destination_id))\n",
        "        self.out.append(Unlock(destination_id))\n",
    ),
    Mutant(
        "a failed batch is forgotten",
        "emu/migration/outbound.py",
        "            self.queue.appendleft(batch)\n            self.arm_lease()\n",
        "",
    ),
    Mutant(
        "tokens in migration are not given back",
        "emu/migration/outbound.py",
        "        self.split_tokens -= prompt_tokens(split.requests)\n        opened",
        "        opened",
    ),
    Mutant(
        "a lease that ends does not free the source",
        "emu/migration/outbound.py",
        "        outbound.queue.remove(batch)\n        outbound.give_up(batch)\n        found",
        "        outbound.queue.remove(batch)\n        found",
    ),
    Mutant(
        "a live migration that failed keeps its blocks",
        "emu/migration/live_move.py",
        "            self.out.append(Unreserve())\n        self.out.append(Leave())\n",
        "            pass\n        self.out.append(Leave())\n",
    ),
    Mutant(
        "a live migration does not release the source",
        "emu/migration/live_move.py",
        "            move.out.append(Release())\n            if not move.request.status.is_terminal:\n",
        "            if not move.request.status.is_terminal:\n",
    ),
    Mutant(
        "blocks freed by a release are one too few",
        "emu/kv/counting.py",
        "        self.blocks_free += request.kv_blocks\n",
        "        self.blocks_free += max(0, request.kv_blocks - 1)\n",
    ),
    Mutant(
        "a reservation is one block short",
        "emu/scheduling/base.py",
        "        return self.ledger.reserve(requests, [self.blocks_for(request) for request in requests])\n",
        "        wanted = [max(1, self.blocks_for(request) - 1) for request in requests]\n"
        "        return self.ledger.reserve(requests, wanted)\n",
    ),
    Mutant(
        "a cancelled request stays in the waiting queue",
        "emu/cluster/cluster.py",
        "any(q.cancel(request) for q in self.queues)\n",
        "bool(self.queues)\n",
    ),
    Mutant(
        "the gateway counts a refused request as outstanding",
        "emu/cluster/gateway.py",
        "        self.released += 1\n        self.outstanding += 1\n        if self._has_many",
        "        self.released += 1\n        self.outstanding += 1 + (request.prompt_tokens > 250)\n"
        "        if self._has_many",
    ),
    Mutant(
        "held requests are forgotten when a replica comes back",
        "emu/cluster/gateway.py",
        "        if self.held:\n            self.route_held()\n",
        "",
    ),
    Mutant(
        "a link that comes back stays down",
        "emu/faults/link_faults.py",
        "        for link in links:\n            self._factors[link].remove(factor)\n"
        "            self._apply(link)\n",
        "        for link in links:\n            self._factors[link].remove(factor)\n",
    ),
    Mutant(
        "stalled transfers are never given up",
        "emu/network/carrier.py",
        "            if now_ns - carried.progress[1] >= self.timeout_ns:\n",
        "            if now_ns - carried.progress[1] >= 1 << 62:\n",
    ),
    Mutant(
        "a hanging transfer has no timeout",
        "emu/network/carrier.py",
        '        elif fate.kind == "hang":\n',
        '        elif fate.kind == "hang":\n            return\n        elif fate.kind == "never":\n',
    ),
    Mutant(
        "a restarted replica takes prompts before its weights are there",
        "emu/faults/recovery.py",
        "                replica.actor.tell(Restarted(life=incarnation))\n",
        "                role = self._role_at_crash.get(replica.replica_id)\n"
        '                replica.state = S.COLOCATED if role == "colocated" else S.PREFILL\n',
    ),
    Mutant(
        "a leap goes on over a straggler's beginning",
        "emu/replica/orders.py",
        "    replica.pace.slow_down(event.factor)\n    replica.look = LOOK\n",
        "    replica.pace.slow_down(event.factor)\n",
    ),
    Mutant(
        "a replica comes back on a GPU that is down",
        "emu/faults/recovery.py",
        "                if not self._has_gpus(replica):\n",
        "                if False:\n",
    ),
    Mutant(
        "a batch that reads KV from a tier does not hear that it is lost",
        "emu/faults/control_faults.py",
        "        replica.actor.tell(TierLost(tier=tier))\n",
        "",
    ),
    Mutant(
        "a planner without metrics decides",
        "emu/autoscale/sight.py",
        "        if self._losses:\n            return None\n",
        "",
    ),
    Mutant(
        "the pod autoscaler forgets what it wanted a moment ago",
        "emu/autoscale/hpa.py",
        "        kept = max(self._lowest.extreme[1], min(total, self._highest.extreme[1]))\n",
        "        kept = self._lowest.extreme[1]\n",
    ),
    Mutant(
        "a planner loads dead replicas",
        "emu/autoscale/local_plans.py",
        "    free = [v for v in snapshot.replicas if v.state is S.INACTIVE]\n",
        "    free = [v for v in snapshot.replicas if v.state in (S.INACTIVE, S.FAILED)]\n",
    ),
    Mutant(
        "the blitz planner goes down by two",
        "emu/autoscale/demand.py",
        "    change = max(change, -1, floor - count)\n",
        "    change = max(change, -2, floor - count)\n",
    ),
)


def run_mutant(job: tuple[int, int]) -> tuple[str, bool, str, float]:
    """(name, caught, the first finding, seconds)."""
    index, seeds = job
    mutant = MUTANTS[index]
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="emu-mutant-") as name:
        copy = Path(name)
        shutil.copytree(ROOT / "emu", copy / "emu", ignore=shutil.ignore_patterns("__pycache__"))
        path = copy / mutant.file
        text = path.read_text()
        if text.count(mutant.old) != 1:
            return mutant.name, False, f"ERROR: text found {text.count(mutant.old)} times", 0.0
        path.write_text(text.replace(mutant.old, mutant.new))
        script = (
            "import sys\n"
            "from emu.apps.chaos.trial import run_world\n"
            "from emu.apps.chaos.worlds.world import draw_world\n"
            "for seed in range(int(sys.argv[1])):\n"
            "    verdict = run_world(draw_world(seed), seed, every=20)\n"
            "    if verdict.problems:\n"
            "        print(f'seed {seed}: {verdict.problems[0]}')\n"
            "        sys.exit(4)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", script, str(seeds)],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy)},
            capture_output=True,
            text=True,
            check=False,
        )
    first = (done.stdout.splitlines() or done.stderr.splitlines()[-1:] or [""])[0]
    return mutant.name, done.returncode != 0, first[:110], time.monotonic() - started_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    wanted = [i for i, mutant in enumerate(MUTANTS) if arguments.only in mutant.name]
    caught, errors, canary = 0, 0, not any("canary" in MUTANTS[i].name for i in wanted)
    with multiprocessing.Pool(arguments.jobs) as pool:
        jobs = [(index, arguments.seeds) for index in wanted]
        for name, is_caught, first, took_s in pool.imap(run_mutant, jobs):
            caught += is_caught
            errors += first.startswith("ERROR")
            canary = canary or (is_caught and name.startswith("canary"))
            print(
                f"{'caught' if is_caught else 'MISSED'} {took_s:5.1f} s  {name}\n    {first}",
                flush=True,
            )
    print(f"{caught} of {len(wanted)} mutants caught, canary {'caught' if canary else 'MISSED'}")
    return 0 if canary and not errors and caught >= len(wanted) - 1 else 4


if __name__ == "__main__":
    sys.exit(main())
