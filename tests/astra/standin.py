"""A stand-in for ASTRA-Sim: speaks its line protocol and misbehaves on demand.

Not a simulator: a graph takes as many cycles as its files have bytes. It exists so that the
client's paths, above all those of failure, can be tested without the real program.

    standin.py MODE --workload-configuration=... [the other options are accepted and ignored]
"""

import os
import signal
import sys
import time
from pathlib import Path

STAMP = "[2026-01-01 00:00:00.000] [workload] [info] "


def options():
    return dict(text.lstrip("-").split("=", 1) for text in sys.argv[2:] if "=" in text)


def say(text):
    print(text, flush=True)


def ids(text):
    return [int(part) for part in text.split(",") if part]


class StandIn:
    def __init__(self, mode):
        self.mode = mode
        given = options()
        self.now = 5_000
        self.npus = ids(given.get("end-npu-ids", "")) + ids(given.get("start-npu-ids", "0,"))
        self.iteration = dict.fromkeys(self.npus, 0)
        self.asleep = set()
        self.log = open("standin.log", "w")  # noqa: SIM115 (lives as long as the process)
        first = Path(given["workload-configuration"] + ".0.et")
        if not first.exists():
            say(f"{STAMP}[critical] workload file: {first} does not exist")

    def report(self, npu):
        say(f"Checking Managed Systems for Controller NPU {npu} ...")
        if self.mode in ("waiting", "ticks"):
            say(f"Waiting <sys={npu}> id={self.iteration[npu]} cycle={self.now}")
        elif self.mode == "unreadable":
            say(f"{STAMP}sys[{npu}] iteration ??")
            say(STAMP + "Waiting")
        else:
            say(
                f"{STAMP}sys[{npu}] iteration {self.iteration[npu]} finished, {self.now} cycles, "
                "exposed communication 0 cycles."
            )
            say(STAMP + "Waiting")

    def answer(self, npu):
        line = sys.stdin.readline().strip()
        print(line, file=self.log, flush=True)
        if line.startswith("pass"):
            self.now += 1_000_000
        elif line == "done":
            self.asleep.add(npu)
        elif line == "exit":
            self.leave()
        elif line:
            path = Path(f"{line}.{npu}.et")
            if not path.exists():
                say(f"{STAMP}[critical] workload file: {path} does not exist")
            else:
                self.iteration[npu] += 1
                self.now += path.stat().st_size
        else:
            sys.exit(0)

    def leave(self):
        say("Checking Non-Exited Systems ...")
        remain = self.mode == "remain"
        say("ERROR: Some Requests Remain" if remain else "All Request Has Been Exited")
        if self.mode == "lingers":
            time.sleep(3600)
        if self.mode == "chatters":
            while True:
                sys.stdout.write("bye\n")
        if self.mode == "raves":
            while True:
                sys.stdout.write("x" * 65536)
        sys.exit(3 if self.mode == "bad_status" else 0)

    def misbehave(self, polls):
        if self.mode == "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        Path("standin.ready").touch()  # it may be ended now
        if self.mode in ("silent", "stubborn"):
            time.sleep(3600)
        if self.mode == "crash" and polls == 1:
            say("about to crash")
            sys.exit(7)
        if self.mode == "killed" and polls == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.mode == "early" and polls == 1:
            self.leave()
        if self.mode == "garbage":
            while True:
                sys.stdout.write("lorem ipsum\n")
        if self.mode == "endless":
            while True:
                sys.stdout.write("x" * 65536)
        if self.mode == "wrong_iteration" and polls == 1:
            self.iteration = dict.fromkeys(self.npus, 9)

    def run(self):
        polls = 0
        while True:
            for npu in self.npus:
                if npu not in self.asleep:
                    self.misbehave(polls)
                    self.report(npu)
                    self.answer(npu)
                    polls += 1


def oneshot(mode):
    npus = 2
    while mode == "oneshot_endless":
        say("again")
    if mode == "oneshot_silent":
        time.sleep(3600)
    for npu in range(npus - (mode == "oneshot_missing")):
        say(f"sys[{npu}] finished, {(npu + 1) * 1_000_000} cycles, exposed communication 0 cycles.")
        say(f"sys[{npu}], Wall time: {(npu + 1) * 1_000_000}")
    sys.exit(5 if mode == "oneshot_crash" else 0)


if __name__ == "__main__":
    if sys.argv[1].startswith("oneshot"):
        oneshot(sys.argv[1])
    StandIn(sys.argv[1]).run()
