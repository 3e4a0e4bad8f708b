"""What `emu serve` is asked: the options of the server, on the command line and in Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, Literal

from emu.options.declare import Option
from emu.options.shared import Logged

_PORT_MAX: Final = 65_535


class ServeOptions(Logged):
    """How the server answers, and what clients may do."""

    command = "serve"

    host: Annotated[str, Option("Address to listen on.")] = "127.0.0.1"
    port: Annotated[
        int, Option("Port to listen on; 0 = any that is free.", at_least=0, at_most=_PORT_MAX)
    ] = 8000
    speed: Annotated[float, Option("Emulated seconds per second.")] = 1.0
    api_key: Annotated[str, Option("Clients must send this key.")] = ""
    control_token: Annotated[
        str,
        Option(
            "Needed for /emu on other than loopback addresses; empty = a random one is printed."
        ),
    ] = ""
    names: Annotated[
        Sequence[str],
        Option(
            "Name that clients use, the first one in answers without a name; none = the model's"
            " own.",
            "--model-name",
        ),
    ] = ()
    tokenizer: Annotated[
        str,
        Option("A Hugging Face tokenizer.json or its directory; empty = one token per byte."),
    ] = ""
    answers: Annotated[
        str,
        Option(
            "JSON lines that say what calls are answered with: rules, or recorded conversations;"
            " empty = filler."
        ),
    ] = ""
    otlp: Annotated[
        str,
        Option(
            "Send a trace of each call to this OpenTelemetry collector, as http://HOST:4318 (extra"
            " `traces`); empty = none."
        ),
    ] = ""
    output_tokens: Annotated[
        int,
        Option(
            "Output length when the client gives no limit; 0 = the config's distribution.",
            at_least=0,
        ),
    ] = 0
    early_stop: Annotated[
        bool,
        Option("Answers may end before the client's limit, as drawn from the distribution."),
    ] = False
    max_outstanding: Annotated[
        int, Option("More answers under way than this are refused with 429.", at_least=0)
    ] = 8192
    max_lag_s: Annotated[
        float,
        Option(
            "New calls get 503 while the emulation is so many seconds behind the clock; 0 = never."
        ),
    ] = 5.0
    max_body_mib: Annotated[
        float, Option("Longer request bodies are refused with 413, on every path.")
    ] = 16.0
    max_recording_mib: Annotated[
        float, Option("No more calls are taken (503) once the recorded traffic is so long.")
    ] = 1024.0
    header_timeout_s: Annotated[
        float,
        Option(
            "A head that is not whole after so long is answered with 408, a body after six times"
            " that.",
            at_least=0,
        ),
    ] = 10.0
    allowed_hosts: Annotated[
        Sequence[str],
        Option(
            "A further name under which clients may address a server on a loopback address.",
            "--allowed-host",
        ),
    ] = ()
    cors_origins: Annotated[
        Sequence[str],
        Option(
            "Pages of this site may call the server, as https://HOST; * = any.", "--cors-origin"
        ),
    ] = ()
    tls_cert: Annotated[
        str, Option("Certificate, as PEM: the server and its ports speak https.")
    ] = ""
    tls_key: Annotated[str, Option("Its key.")] = ""
    fleet: Annotated[
        bool,
        Option("Each replica answers on a port of its own, for routers and autoscalers outside."),
    ] = False
    ports: Annotated[
        int,
        Option(
            "The first of these ports; 0 = the one after --port.", at_least=0, at_most=_PORT_MAX
        ),
    ] = 0
    fronts: Annotated[
        int,
        Option(
            "So many processes hold the connections of clients, around the one that emulates; 0 ="
            " none.",
            at_least=0,
            at_most=64,
        ),
    ] = 0
    face: Annotated[
        Literal["vllm", "sglang"], Option("Whose metrics and figures these ports have.")
    ] = "vllm"
    kv_lease_s: Annotated[
        float,
        Option(
            "Emulated seconds for which a prefill port keeps KV that no decode port fetches.",
            at_least=0,
        ),
    ] = 480.0
    kv_events_port: Annotated[
        int | None,
        Option(
            "Publish the endpoints' KV events (ZMQ) from this port on, with as many replay ports"
            " behind; 0 = ports that the system chooses.",
            "--kv-events",
            at_least=0,
            at_most=_PORT_MAX,
        ),
    ] = None
    grpc_port: Annotated[
        int | None,
        Option(
            "Speak vLLM's or SGLang's gRPC (see --face) on this port, with --fleet on one for each"
            " replica from it on (extra `grpc`); 0 = ports that the system chooses.",
            "--grpc",
            at_least=0,
            at_most=_PORT_MAX,
        ),
    ] = None
    wire: Annotated[str, Option("Whose form these events have: vllm-0.16 to vllm-0.33.")] = (
        "vllm-0.19"
    )
    lost: Annotated[
        Literal["error", "reset"],
        Option(
            "An answer whose replica dies ends with an error event, or its connection is reset."
        ),
    ] = "error"
    faults_from: Annotated[
        Literal["start", "first-request"],
        Option("From when the times of the configuration's faults and commands count."),
    ] = "start"
    strict_pace: Annotated[
        bool,
        Option("End with status 3 when the machine does not keep up with the emulation."),
    ] = False
    slow_down: Annotated[
        Literal["off", "auto"],
        Option("auto = lower the speed while the machine does not keep up; off = never."),
    ] = "off"
    startup_s: Annotated[
        float, Option("Emulated start-up; -1 = the time to load the weights.")
    ] = -1.0
    drain_s: Annotated[
        float, Option("Seconds that answers under way have after SIGTERM.", at_least=0)
    ] = 30.0

    @property
    def model_name(self) -> str:
        """The name in answers without one; empty = the model's own."""
        return next(iter(self.names), "")

    @property
    def model_aliases(self) -> tuple[str, ...]:
        """Further names."""
        return tuple(self.names[1:])

    @property
    def has_fleet(self) -> bool:
        """Replicas have ports."""
        return self.fleet or self.ports > 0
