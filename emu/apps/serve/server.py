"""Live mode from its sockets to its files: ports, signals, tasks, and the end.

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
import resource
import secrets
import shlex
import socket
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import anyio
import msgspec
from anyio.abc import TaskGroup

from emu.apps.serve.answers import Answers
from emu.apps.serve.app import Api, make_app
from emu.apps.serve.endpoint_app import EndpointApi, endpoint_app
from emu.apps.serve.fleet import Fleet, check_fleet
from emu.apps.serve.fronts.frames import Settings
from emu.apps.serve.fronts.link import Fronts
from emu.apps.serve.garbage import Garbage
from emu.apps.serve.guard import is_loopback
from emu.apps.serve.intake import LiveProtocol
from emu.apps.serve.kubernetes.http import Kubernetes
from emu.apps.serve.kv_events import KvEvents
from emu.apps.serve.listening import (
    OwnPorts,
    Ports,
    bind,
    make_web_server,
    port_of,
    reserve,
)
from emu.apps.serve.options import ServeOptions
from emu.apps.serve.pace import Adapter
from emu.apps.serve.pictures import shown_to
from emu.apps.serve.ports import Dispatch, ReplicaPorts
from emu.apps.serve.recording import LatenessFile, ReplayFile, Tape, TrafficLog
from emu.apps.serve.service import Service, schedule, served_names, weights_from_host_s
from emu.apps.serve.snapshot import snapshot
from emu.apps.serve.tokenizer import make_tokenizer
from emu.apps.serve.tokenizer_files import write_tokenizer
from emu.apps.serve.traces.recorder import Recorder
from emu.apps.serve.wire import wire_of
from emu.apps.serve.world import LiveCluster, live_config
from emu.cluster.plan import Plan, make_plan
from emu.config.load import load_config
from emu.config.places import placing
from emu.config.schema import CommandTable, Config, FaultTable
from emu.errors import InputError, PaceLost, needs_extra
from emu.kernel.wallclock import WallKernel
from emu.log import make_log
from emu.process.interrupts import sent_to
from emu.replica.view import ReplicaHandle
from emu.report.atomic import RunDirectory, write_text
from emu.report.summary import write_summary
from emu.runs.run_json import Began, run_json
from emu.runs.runner import next_free, say_moved
from emu.units import NS_PER_S, s_to_ns

if TYPE_CHECKING:
    from emu.apps.serve.engine_rpc import RpcPorts
    from emu.apps.serve.traces.otlp import Exporter

_TICK_S: Final = 0.1
_PORTS_S: Final = 0.05
_TICKS_PER_SECOND: Final = 10


def _exporter(options: ServeOptions) -> Exporter | None:
    """Where traces go. Raises InputError."""
    if not options.otlp:
        return None
    if not options.otlp.startswith(("http://", "https://")):
        raise InputError("serve", None, "--otlp", "is an address as http://HOST:4318")
    with needs_extra("traces", "serve", "--otlp"):
        from emu.apps.serve.traces.otlp import Exporter

    return Exporter(options.otlp, options.face)


def _rpc(options: ServeOptions) -> RpcPorts | None:
    """gRPC ports, if any are asked for."""
    if options.grpc_port is None:
        return None
    with needs_extra("grpc", "serve", "--grpc"):
        from emu.apps.serve.engine_rpc import RpcPorts

    return RpcPorts(options.host, options.grpc_port, options.face)


Announce = Callable[["LiveServer"], None]
"""Called when clients can connect."""


class LiveServer:
    """A server from its configuration to its results."""

    def __init__(self, config: Config, source: str, options: ServeOptions, directory: Path) -> None:
        """Raises InputError for anything that is wrong with the input."""
        self.config = live_config(config)
        self.source = source
        self.options = options
        self.directory = directory
        self._later: list[CommandTable | FaultTable] = []
        """Commands and faults whose times count from the first call."""
        if options.faults_from == "first-request":
            self._later = [*self.config.commands, *self.config.faults]
            self.config = msgspec.structs.replace(self.config, commands=[], faults=[])
        self.plan = make_plan(self.config, source)
        if len(self.plan.models) > 1:
            where = "models" if self.config.models else "replicas"
            for option, given in (
                ("--fleet", options.has_fleet),
                ("--model-name", options.model_name),
            ):
                if given:
                    raise InputError(source, None, where, f"{option} is for one model")
        if options.has_fleet:
            policy = self.config.scheduler.policy
            check_fleet(len(self.plan.replicas), policy, options.ports, source)
        self.tokenizer = make_tokenizer(Path(options.tokenizer) if options.tokenizer else None)
        if len(self.plan.models) == 1:
            self.tokenizer.shown = shown_to(self.plan.replicas[0])
        self.answers = Answers(Path(options.answers) if options.answers else None)
        self.exporter = _exporter(options)
        self.rpc = _rpc(options)
        self.service: Service | None = None
        self.port = options.port
        self._began = Began.now()
        self._group: TaskGroup | None = None
        self.fleet: Fleet | None = None
        self.ports: ReplicaPorts | None = None
        self.entrance: Ports | None = None
        """What holds the connections of clients."""
        self._endpoint_sockets: list[socket.socket] = []
        self._garbage = Garbage()

    async def run(self, *, announce: Announce | None = None, handle_signals: bool = True) -> None:
        """Serve until a signal (or `stop`), then write the results.

        `announce(self)` is called when clients can connect. Raises what the emulation raised.
        """
        if not handle_signals:
            await self._run(announce)
            return
        # To the very end: a signal while results are written has nothing left to end.
        with sent_to(asyncio.get_running_loop(), self._on_signal):
            await self._run(announce)

    async def _run(self, announce: Announce | None) -> None:
        options = self.options
        take = reserve if options.fronts else bind
        listening = take(options.host, options.port, "--host, --port")
        self.port = port_of(listening)
        cluster: LiveCluster | None = None
        files: RunDirectory | None = None
        try:
            if self.options.has_fleet:
                self._bind_endpoints()
            self.directory.mkdir(parents=True, exist_ok=True)
            write_tokenizer(self.directory / "tokenizer", _longest(self.plan))
            files = RunDirectory(self.directory / "run")
            names = served_names(self.plan)
            limit = int(self.options.max_recording_mib * 2**20)
            tape = Tape(
                TrafficLog(self.directory / "workload.jsonl", limit, models=names),
                ReplayFile(self.directory / "replay.toml", self.config),
                LatenessFile(self.directory / "lateness.csv"),
            )
            clock = WallKernel(
                speed=self.options.speed,
                events_per_instant_max=self.config.limits.events_per_instant,
            )
            log = make_log(self.options.level, self.options.log_format)
            recorder = None
            if self.exporter is not None:
                recorder = Recorder(secrets.token_hex(8), self.exporter.take)
            cluster = LiveCluster(
                self.plan, files.staging, tape, clock, log, recorder, self.options.face
            )
            await self._serve(listening, cluster, announce)
            self._publish(files, cluster)
        except BaseException:
            if cluster is not None:
                cluster.world.discard()
            if files is not None:
                files.discard()
            raise
        finally:
            listening.close()
            for endpoint in self._endpoint_sockets:
                endpoint.close()

    async def _serve(
        self, listening: socket.socket, cluster: LiveCluster, announce: Announce | None
    ) -> None:
        service = self.service = Service(
            cluster,
            self.plan,
            self.tokenizer,
            self.options,
            answers=self.answers,
            startup_ns=self._startup_ns(),
        )
        if self._later:
            service.on_first_call.append(partial(schedule, service, self._later))
        dispatch = Dispatch()
        entrance = self.entrance = self._make_entrance(service, dispatch)
        ports = self._make_fleet(service, dispatch, entrance) if self.options.has_fleet else None
        kubernetes = Kubernetes(service, [] if self.fleet is None else self.fleet.endpoints)
        dispatch.main = make_app(service, kubernetes)
        ended = asyncio.Event()
        async with contextlib.AsyncExitStack() as last, anyio.create_task_group() as group:
            if self.fleet is not None and self.fleet.events is not None:
                last.callback(self.fleet.events.close)  # after the tasks that publish and answer

            async def emulate() -> None:
                outcome = await cluster.world.live()
                cluster.end_open(outcome.error)
                service.is_draining = True
                service.hub.close()
                entrance.end()
                ended.set()

            group.start_soon(emulate)
            group.start_soon(self._tick, service)
            group.start_soon(kubernetes.run)
            if self.exporter is not None:
                group.start_soon(self.exporter.run)
                last.push_async_callback(self.exporter.flush)
            self._group = group
            try:
                await entrance.start(listening)
                if self.rpc is not None:
                    last.push_async_callback(self.rpc.stop)
                    await self.rpc.start(self._rpc_apis(service))
                if ports is not None:
                    if entrance.started:
                        await ports.update()
                    group.start_soon(self._keep_ports, ports, entrance)
                if announce is not None:
                    announce(self)
                self._garbage.begin()
                last.callback(self._garbage.end)
                await entrance.serve()
            finally:
                entrance.drop()
            cluster.close_door()
            await ended.wait()
            group.cancel_scope.cancel()

    def _rpc_apis(self, service: Service) -> list[tuple[Api, Sequence[ReplicaHandle], str]]:
        """(application, replicas, role) of each gRPC port."""
        fleet = self.fleet
        if fleet is None:
            return [(Api(service), service.cluster.replicas, "")]
        return [
            (EndpointApi(service, fleet, endpoint), [endpoint.replica], endpoint.role)
            for endpoint in fleet.endpoints
        ]

    def _make_entrance(self, service: Service, dispatch: Dispatch) -> Ports:
        """What holds the connections of clients: this process, or fronts."""
        options = self.options
        if options.fronts:
            settings = Settings(
                options.host,
                options.tls_cert,
                options.tls_key,
                options.header_timeout_s,
                int(options.max_body_mib * 2**20),
                service.piece_bytes,
            )
            return Fronts(options.fronts, settings, dispatch, service.intake, service.cluster)
        limit_s = options.header_timeout_s
        protocol = partial(LiveProtocol, intake=service.intake, head_timeout_s=limit_s)
        server = make_web_server(dispatch, protocol, options.tls_cert, options.tls_key)
        return OwnPorts(server, options.host, bound=self._endpoint_sockets)

    def _make_fleet(self, service: Service, dispatch: Dispatch, entrance: Ports) -> ReplicaPorts:
        """Endpoints, and their ports."""
        options = self.options
        ports = [port_of(s) for s in self._endpoint_sockets]
        fleet = Fleet(service, ports, face=options.face, lease_s=options.kv_lease_s)
        self.fleet = fleet
        service.ports = ports
        if options.kv_events_port is not None:
            wire = service.wire
            fleet.events = KvEvents(service, fleet.endpoints, options.kv_events_port, wire)
        for endpoint in fleet.endpoints:
            dispatch.by_port[endpoint.port] = endpoint_app(service, fleet, endpoint)
        self.ports = ReplicaPorts(fleet.endpoints, entrance)
        return self.ports

    async def _keep_ports(self, ports: ReplicaPorts, entrance: Ports) -> None:
        """Ports follow the states of their replicas."""
        while True:
            if entrance.started:
                await ports.update()
                for problem in ports.problems:
                    print(f"warning: {problem}", file=sys.stderr, flush=True)
                ports.problems.clear()
            if self.fleet is not None:
                self.fleet.handoffs.sweep()
                if self.fleet.events is not None:
                    self.fleet.events.update()
            await asyncio.sleep(_PORTS_S)

    def _startup_ns(self) -> int:
        """Emulated start-up: given, or the time to load the weights from host memory."""
        if self.options.startup_s >= 0:
            return s_to_ns(self.options.startup_s)
        return s_to_ns(weights_from_host_s(self.plan))

    async def _tick(self, service: Service) -> None:
        """Let time be seen to pass: samples, snapshots, lag; slow down or give up if need be."""
        kernel = service.cluster.kernel
        loop = asyncio.get_running_loop()
        adapter = Adapter(service.cluster.pace, self.options.speed)
        ticks = 0
        while True:
            due_s = loop.time() + _TICK_S
            await asyncio.sleep(_TICK_S)
            service.lateness.note(max(0.0, loop.time() - due_s), kernel.behind_ns / NS_PER_S)
            kernel.enter(_nothing)  # samples are taken when time passes
            self._garbage.tick(is_idle=service.cluster.open_choices == 0)
            ticks += 1
            if ticks % _TICKS_PER_SECOND == 0:
                if self.options.slow_down == "auto":
                    self._adapt(service, adapter)
                self._judge(service)
                point = service.trends.take()
                if service.hub.listeners:
                    service.hub.publish(point)
                    service.hub.publish(snapshot(service))
                service.cluster.flush()

    def _adapt(self, service: Service, adapter: Adapter) -> None:
        before = service.speed
        speed = adapter.next_speed(before, service.lateness.drift_s)
        if speed != before:
            why = "the machine does not keep up" if speed < before else "the machine keeps up"
            service.set_speed(speed, why)
            print(f"speed        {before:.3g} to {speed:.3g}: {why}", file=sys.stderr, flush=True)

    def _judge(self, service: Service) -> None:
        """Say that the pace is lost, and again when it is much worse; a strict server ends."""
        pace, now_ns = service.cluster.pace, service.cluster.kernel.wall_ns()
        if not pace.is_worse():
            return
        print(f"warning: {pace.sentence()}", file=sys.stderr, flush=True)
        service.hub.publish({"event": "pace", "at_s": now_ns / NS_PER_S, "text": pace.sentence()})
        if self.options.strict_pace and self._group is not None:
            service.is_draining = True
            service.cluster.leave_all()
            self._group.start_soon(self.stop)

    def _on_signal(self) -> None:
        # The loop calls this, which has nothing to run before the group is there.
        service, group = self.service, self._group
        assert service is not None
        assert group is not None
        if service.is_draining:
            service.cluster.leave_all()
        else:
            service.is_draining = True
            group.start_soon(self.stop)

    async def stop(self) -> None:
        """Drain: nothing new, finish what is under way, then end."""
        service = self.service
        assert service is not None
        service.is_draining = True
        cluster = service.cluster
        if self.fleet is not None:
            self.fleet.handoffs.sweep(everything=True)
        deadline_s = time.monotonic() + self.options.drain_s
        while cluster.gateway.outstanding and cluster.error is None:
            if time.monotonic() > deadline_s:
                cluster.leave_all()
                deadline_s = float("inf")
            await asyncio.sleep(0.02)
        cluster.close_door()

    def _publish(self, files: RunDirectory, cluster: LiveCluster) -> None:
        """Write the results, as a run does."""
        pace, service, world = cluster.pace, self.service, cluster.world
        assert service is not None
        assert world.outcome is not None
        world.close()
        if world.error is None and self.options.strict_pace and pace.is_late:
            world.error = PaceLost(pace.sentence())
        summary = world.write_results(cluster.tape.traffic.lines)
        summary.pace = pace.summary(self.options.speed, service.speed_changes)
        write_summary(files.staging / "summary.json", summary)
        text = run_json(
            self.config, self.plan, self.source, files.final, world.outcome, self._began
        )
        write_text(files.staging / "run.json", text)
        if world.error is not None:
            files.publish_partial()
            raise world.error
        files.publish()
        if self.config.output.report:
            from emu.report.run_page import write_report

            write_report(self.directory / "run")

    def _bind_endpoints(self) -> None:
        """A port for each replica. Raises InputError."""
        base = self.options.ports or (self.port + 1 if self.options.port else 0)
        for index in range(len(self.plan.replicas)):
            port = base + index if base else 0
            take = reserve if self.options.fronts else bind
            self._endpoint_sockets.append(take(self.options.host, port, "--ports"))

    @property
    def url(self) -> str:
        """Where clients find the server."""
        host = "127.0.0.1" if self.options.host in ("0.0.0.0", "") else self.options.host
        scheme = "https" if self.options.tls_cert else "http"
        return (
            f"{scheme}://[{host}]:{self.port}" if ":" in host else f"{scheme}://{host}:{self.port}"
        )


def _nothing() -> None:
    """Time has passed."""


def _longest(plan: Plan) -> int:
    return max(r.max_model_tokens for r in plan.replicas)


def client_lines(server: LiveServer) -> list[tuple[str, str]]:
    """(client, exact command) for the clients that are known to work."""
    service = server.service
    assert service is not None
    url, model = server.url, shlex.quote(service.model)
    custom = server.options.tokenizer
    folder = Path(custom) if custom else server.directory / "tokenizer"
    tokenizer = shlex.quote(str(folder.resolve()))
    key = server.options.api_key or "x"
    python = (
        f"from openai import OpenAI; c = OpenAI(base_url='{url}/v1', api_key='{key}'); "
        f"print(c.chat.completions.create(model='{service.model}', max_tokens=64, "
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
    service = server.service
    assert service is not None
    token = f"/?token={service.control_token}" if service.control_token else "/"
    names = ", ".join(service.models) if len(service.models) > 1 else service.model
    print(f"serving {names} on {server.url}/v1, speed {server.options.speed:g}")
    print(f"live page    {server.url}{token}")
    print(f"recording    {server.directory}")
    if service.startup_left_s:
        print(f"ready in     {service.startup_left_s:.1f} s (emulated start-up)")
    if server.fleet is not None:
        for endpoint in server.fleet.endpoints:
            place = server.url.rpartition(":")[0]
            replica = endpoint.replica
            print(f"replica {replica.replica_id:<4} {place}:{endpoint.port}  {replica.state.value}")
    if server.rpc is not None:
        for port in server.rpc.ports:
            print(f"grpc         {server.options.host}:{port}")
    for name, line in client_lines(server):
        print(f"{name:<12} {line}")
    sys.stdout.flush()


def _raise_file_limit() -> None:
    """Thousands of streams need thousands of descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _holds_traffic(directory: Path) -> bool:
    """Some session has left calls there."""
    recorded = directory / "workload.jsonl"
    return recorded.is_file() and recorded.stat().st_size > 0


def serve_command(
    path: Path,
    options: ServeOptions,
    *,
    output: Path,
    overrides: tuple[str, ...],
    quiet: bool,
    force: bool = False,
) -> int:
    """`emu serve`."""
    if not options.speed > 0:
        raise InputError("serve", None, "--speed", "must be above 0")
    wire_of(options.wire)
    if bool(options.tls_cert) != bool(options.tls_key):
        raise InputError("serve", None, "--tls-cert, --tls-key", "are given together")
    for name, place in (("--tls-cert", options.tls_cert), ("--tls-key", options.tls_key)):
        if place and not Path(place).is_file():
            raise InputError(place, None, name, "no such file")
    if options.kv_events_port is not None and not options.has_fleet:
        raise InputError("serve", None, "--kv-events", "needs --fleet: events are of endpoints")
    if not options.header_timeout_s > 0:
        raise InputError("serve", None, "--header-timeout-s", "must be above 0")
    config = load_config(path, overrides)
    asked = output
    if not force:
        output = next_free(output, _holds_traffic)
    with placing(str(path)):
        server = LiveServer(config, str(path), options, output)
    say_moved(asked, output)
    if not is_loopback(options.host) and not options.api_key:
        print("warning: reachable from other machines without --api-key", file=sys.stderr)
    _raise_file_limit()

    async def main() -> None:
        await server.run(announce=None if quiet else _announce)

    anyio.run(main, backend_options={"use_uvloop": sys.platform != "win32"})
    if not quiet:
        assert server.service is not None
        print(server.service.cluster.pace.sentence())
        print(f"results in {output / 'run'}; replay with: python -m emu {output / 'replay.toml'}")
    return 0
