"""The rim of live mode: sockets, signals, files, and the end.

One event loop holds the actors and the HTTP server. SIGTERM or SIGINT drains: new calls get 503,
answers under way are finished (at most `--drain-s` of wall time), results are written, and the
process ends with 0. A second signal cancels what is left.

    DIR/tokenizer/       the built-in tokenizer, for clients
    DIR/workload.jsonl   the recorded traffic, and
    DIR/replay.toml      the configuration that replays it
    DIR/run/             the files of every run (requests.csv, summary.json, ...), at the end
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import resource
import shlex
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import anyio
import uvicorn
from anyio.abc import TaskGroup

from emu.cluster.audit import final_error
from emu.cluster.cluster import Outcome
from emu.cluster.plan import Plan, make_plan
from emu.config.load import load_config
from emu.config.schema import Config
from emu.errors import InputError, naming
from emu.kernel.wallclock import WallKernel
from emu.log import make_log
from emu.process.interrupts import sent_to
from emu.report.atomic import RunDirectory, write_text
from emu.runs.runner import host_facts, write_results
from emu.serve.app import make_app
from emu.serve.control import snapshot
from emu.serve.house import House, ServeOptions, is_loopback
from emu.serve.recording import LiveRecorder, ReplayFile, TrafficLog
from emu.serve.tokens import make_tokenizer, write_tokenizer
from emu.serve.world import LiveCluster, live_config
from emu.units import NS_PER_S, s_to_ns

_BACKLOG: Final = 4096
_TICK_S: Final = 0.1
_TICKS_PER_SNAPSHOT: Final = 5
_TICKS_PER_FLUSH: Final = 10
_CLOSE_S: Final = 5.0
"""Wall time that clients have to take the last bytes."""


class _Server(uvicorn.Server):
    """Leaves signals to us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take none."""
        yield


class LiveServer:
    """A server from its configuration to its results."""

    def __init__(self, config: Config, source: str, options: ServeOptions, directory: Path) -> None:
        """Raises InputError for anything that is wrong with the input."""
        self.config = live_config(config)
        self.source = source
        self.options = options
        self.directory = directory
        self.plan = make_plan(self.config, source)
        self.tokenizer = make_tokenizer(Path(options.tokenizer) if options.tokenizer else None)
        self.house: House | None = None
        self.port = options.port
        self._started = (time.perf_counter(), time.process_time())
        self._server: _Server | None = None
        self._group: TaskGroup | None = None

    # --- running ------------------------------------------------------------------------------
    async def run(self, *, announce: Any = None, handle_signals: bool = True) -> None:
        """Serve until a signal (or `stop`), then write the results.

        `announce(self)` is called when clients can connect. Raises what the emulation raised.
        """
        if not handle_signals:
            await self._run(announce)
            return
        # To the very end: a signal while results are written has nothing left to end.
        with sent_to(asyncio.get_running_loop(), self._on_signal):
            await self._run(announce)

    async def _run(self, announce: Any) -> None:
        listening = self._bind()
        recorder: LiveRecorder | None = None
        files: RunDirectory | None = None
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            write_tokenizer(self.directory / "tokenizer", _longest(self.plan))
            files = RunDirectory(self.directory / "run")
            recorder = LiveRecorder(
                files.staging,
                self.config.output,
                TrafficLog(self.directory / "workload.jsonl"),
                ReplayFile(self.directory / "replay.toml", self.config),
            )
            recorder.log = make_log(self.options.log_level, self.options.log_format)
            outcome, cluster = await self._serve(listening, recorder, announce)
            self._publish(files, recorder, cluster, outcome)
        except BaseException:
            if recorder is not None:
                recorder.close()
                recorder.requests.discard()
            if files is not None:
                files.discard()
            raise
        finally:
            listening.close()

    async def _serve(
        self, listening: socket.socket, recorder: LiveRecorder, announce: Any
    ) -> tuple[Outcome, LiveCluster]:
        kernel = WallKernel(
            speed=self.options.speed, events_per_instant_max=self.config.limits.events_per_instant
        )
        caching = any(r.scheduler.prefix_caching for r in self.plan.replicas)
        cluster = LiveCluster(self.plan, recorder, kernel, has_prefixes=caching)
        recorder.started(cluster)
        house = self.house = House(
            cluster, self.plan, self.tokenizer, self.options, startup_ns=self._startup_ns()
        )
        server = self._server = _Server(
            uvicorn.Config(
                make_app(house),
                lifespan="off",
                log_level="warning",
                access_log=False,
                backlog=_BACKLOG,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=int(_CLOSE_S),
            )
        )
        kept: list[Outcome] = []
        ended = asyncio.Event()
        async with anyio.create_task_group() as group:

            async def emulate() -> None:
                outcome = await cluster.run()
                kept.append(outcome)
                if outcome.error is not None:
                    cluster.fail_open(outcome.error)
                house.is_draining = True
                house.hub.close()
                server.should_exit = True
                ended.set()

            group.start_soon(emulate)
            group.start_soon(self._tick, house)
            self._group = group
            if announce is not None:
                announce(self)
            gc.collect()
            gc.freeze()
            try:
                await server.serve(sockets=[listening])
            finally:
                _drop_connections(server)
            cluster.close()
            await ended.wait()
            group.cancel_scope.cancel()
        return kept[0], cluster

    def _startup_ns(self) -> int:
        """Emulated start-up: given, or the time to load the weights from host memory."""
        if self.options.startup_s >= 0:
            return s_to_ns(self.options.startup_s)
        longest_s = 0.0
        for replica in self.plan.replicas:
            if replica.role != "inactive":
                node = replica.node
                gbps = node.pcie_gbps if node.pcie_gbps > 0 else replica.gpu.pcie_gbps
                weights = max(replica.memory.physical_weight_bytes)
                longest_s = max(longest_s, weights * 8 / (gbps * 1e9))
        return s_to_ns(longest_s)

    async def _tick(self, house: House) -> None:
        """Let time be seen to pass: samples, snapshots, lag."""
        kernel = house.cluster.kernel
        loop = asyncio.get_running_loop()
        ticks = 0
        while True:
            due_s = loop.time() + _TICK_S
            await asyncio.sleep(_TICK_S)
            house.loop_lag_s = max(0.0, loop.time() - due_s)
            house.loop_lag_max_s = max(house.loop_lag_max_s, house.loop_lag_s)
            entered_ns = kernel.wall_ns()

            def seen(entered_ns: int = entered_ns) -> None:
                house.drift_s = max(0.0, (kernel.wall_ns() - entered_ns) / NS_PER_S)
                house.drift_max_s = max(house.drift_max_s, house.drift_s)

            kernel.enter(seen)
            ticks += 1
            if ticks % _TICKS_PER_SNAPSHOT == 0 and house.hub.listeners:
                house.hub.publish(snapshot(house))
            if ticks % _TICKS_PER_FLUSH == 0:
                house.cluster.tape.flush()

    # --- ending -------------------------------------------------------------------------------
    def _on_signal(self) -> None:
        # The loop calls this, which has nothing to run before the group is there.
        house, group = self.house, self._group
        assert house is not None
        assert group is not None
        if house.is_draining:
            house.cluster.leave_all()
        else:
            house.is_draining = True
            group.start_soon(self.stop)

    async def stop(self) -> None:
        """Drain: nothing new, finish what is under way, then end."""
        house = self.house
        assert house is not None
        house.is_draining = True
        cluster = house.cluster
        deadline_s = time.monotonic() + self.options.drain_s
        while cluster.gateway.outstanding and cluster.error is None:
            if time.monotonic() > deadline_s:
                cluster.leave_all()
                deadline_s = float("inf")
            await asyncio.sleep(0.02)
        cluster.close()

    def _publish(
        self, files: RunDirectory, recorder: LiveRecorder, cluster: LiveCluster, outcome: Outcome
    ) -> None:
        """Write the results, as a run does."""
        recorder.close()
        error = final_error(cluster, outcome.error)
        write_results(files.staging, cluster, recorder, error, rows=recorder.traffic.lines)
        text = host_facts(self.config, self.source, outcome, *self._started)
        write_text(files.staging / "run.json", text)
        if error is not None:
            files.publish_partial()
            raise error
        files.publish()
        if self.config.output.report:
            from emu.report.html import write_report

            write_report(self.directory / "run")

    # --- the socket ---------------------------------------------------------------------------
    def _bind(self) -> socket.socket:
        """Raises InputError if the address cannot be had."""
        host, port = self.options.host, self.options.port
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            family, kind, protocol, _, address = found[0]
            listening = socket.socket(family, kind, protocol)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(_BACKLOG)  # who reads the announcement may connect at once
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise InputError(f"{host}:{port}", None, "--host, --port", reason) from None
        listening.setblocking(False)
        self.port = int(listening.getsockname()[1])
        return listening

    @property
    def url(self) -> str:
        """Where clients find the server."""
        host = "127.0.0.1" if self.options.host in ("0.0.0.0", "") else self.options.host
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


def _drop_connections(server: _Server) -> None:
    """Nothing stays open, whatever has ended the server (after a drain nothing is)."""
    for acceptor in getattr(server, "servers", []):
        acceptor.close()
    for connection in list(server.server_state.connections):
        transport = getattr(connection, "transport", None)
        if transport is not None:
            transport.abort()


def _longest(plan: Plan) -> int:
    return max(r.max_model_tokens for r in plan.replicas)


# --- the command --------------------------------------------------------------------------------
def client_lines(server: LiveServer) -> list[tuple[str, str]]:
    """(client, exact command) for the clients that are known to work."""
    house = server.house
    assert house is not None
    url, model = server.url, shlex.quote(house.model)
    custom = server.options.tokenizer
    folder = Path(custom) if custom else server.directory / "tokenizer"
    tokenizer = shlex.quote(str(folder.resolve()))
    key = server.options.api_key or "x"
    python = (
        f"from openai import OpenAI; c = OpenAI(base_url='{url}/v1', api_key='{key}'); "
        f"print(c.chat.completions.create(model='{house.model}', max_tokens=64, "
        "messages=[{'role': 'user', 'content': 'hello'}]).choices[0].message.content)"
    )
    given = f" --api-key {shlex.quote(key)}" if server.options.api_key else ""
    return [
        ("openai", f"python -c {shlex.quote(python)}"),
        (
            "aiperf",
            f"aiperf profile --model {model} --url {url} --endpoint-type chat --streaming "
            f"--tokenizer {tokenizer} --ui none --concurrency 8 --request-count 64 "
            "--warmup-request-count 16 "
            f"--synthetic-input-tokens-mean 256 --output-tokens-mean 64{given}",
        ),
        (
            "guidellm",
            f"guidellm run --backend kind=openai_http,target={url},model={model} "
            f"--tokenizer kind=hf_auto,model={tokenizer} "
            "--data kind=synthetic_text,prompt_tokens=256,output_tokens=64 "
            "--profile kind=concurrent,streams=8 --constraint kind=max_requests,count=64",
        ),
        (
            "vllm",
            f"vllm bench serve --base-url {url} --model {model} --tokenizer {tokenizer} "
            "--dataset-name random --random-input-len 256 --random-output-len 64 --num-prompts 64",
        ),
        ("emu", f"python -m emu observe {url} --workload WORKLOAD.jsonl"),
    ]


def _announce(server: LiveServer) -> None:
    house = server.house
    assert house is not None
    token = f"/?token={house.control_token}" if house.control_token else "/"
    print(f"serving {house.model} on {server.url}/v1, speed {server.options.speed:g}")
    print(f"live page    {server.url}{token}")
    print(f"recording    {server.directory}")
    if house.startup_left_s:
        print(f"ready in     {house.startup_left_s:.1f} s (emulated start-up)")
    for name, line in client_lines(server):
        print(f"{name:<12} {line}")
    sys.stdout.flush()


def _raise_file_limit() -> None:
    """Thousands of streams need thousands of descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def serve_command(
    path: Path, options: ServeOptions, *, output: Path, overrides: tuple[str, ...], quiet: bool
) -> int:
    """`emu serve`."""
    if not options.speed > 0:
        raise InputError("serve", None, "--speed", "must be above 0")
    config = load_config(path, overrides)
    with naming(str(path)):
        server = LiveServer(config, str(path), options, output)
    if not is_loopback(options.host) and not options.api_key:
        print("warning: reachable from other machines without --api-key", file=sys.stderr)
    _raise_file_limit()

    async def main() -> None:
        await server.run(announce=None if quiet else _announce)

    anyio.run(main, backend_options={"use_uvloop": sys.platform != "win32"})
    if not quiet:
        print(f"results in {output / 'run'}; replay with: python -m emu {output / 'replay.toml'}")
    return 0
