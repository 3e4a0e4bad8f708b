"""What the command line of `emu serve` says."""

from __future__ import annotations

import msgspec

from emu.log import Format, Level


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line of `serve` says."""

    host: str = "127.0.0.1"
    port: int = 8000
    speed: float = 1.0
    api_key: str = ""
    control_token: str = ""
    model_name: str = ""
    model_aliases: tuple[str, ...] = ()
    """Further names under which clients may ask for the model."""
    tokenizer: str = ""
    output_tokens: int = 0
    """Output length when the client gives no limit; 0 = the config's distribution."""
    early_stop: bool = False
    """Answers end by themselves before the client's limit, as drawn from the distribution."""
    max_outstanding: int = 8192
    max_lag_s: float = 5.0
    """Wall seconds behind the clock above which new calls get 503; 0 = no bound."""
    max_body_mib: float = 16.0
    max_recording_mib: float = 1024.0
    header_timeout_s: float = 10.0
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    strict_pace: bool = False
    tls_cert: str = ""
    tls_key: str = ""
    fleet: bool = False
    """Each replica answers on a port of its own."""
    ports: int = 0
    """The first of these ports; 0 = the port after the server's own."""
    face: str = "vllm"
    kv_lease_s: float = 480.0
    kv_events_port: int | None = None
    wire: str = "vllm-0.19"
    slow_down: str = "off"
    """"auto" lowers the speed while the machine does not keep up."""
    startup_s: float = -1.0
    """Emulated start-up; -1 = loading the weights from host memory."""
    drain_s: float = 30.0
    log_level: Level = "off"
    log_format: Format = "text"
