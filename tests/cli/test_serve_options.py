"""What `emu serve` hands to the server."""

from __future__ import annotations

from typing import Any

import pytest

import emu.apps.serve.server
from emu.apps.serve.options import ServeOptions
from emu.cli import main


def test_a_line_of_serve_is_what_the_server_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def record(config: object, options: object, **rest: object) -> int:
        seen.append((options, rest))
        return 0

    monkeypatch.setattr(emu.apps.serve.server, "serve_command", record)
    assert main(["serve", "c.toml"]) == 0
    words = "serve c.toml --model-name a b c --ports 9000 --allowed-host h --kv-events 5"
    assert main([*words.split(), "--log-format", "json", "--set", "a=1", "-q"]) == 0
    (plain, _), (given, rest) = seen
    default = vars(ServeOptions())
    assert {name: vars(plain)[name] for name in default} == default
    assert (given.model_name, given.model_aliases) == ("a", ("b", "c"))
    assert (given.has_fleet, given.ports, list(given.allowed_hosts)) == (True, 9000, ["h"])
    assert (given.kv_events_port, given.level, given.log_format) == (5, "info", "json")
    assert (rest["overrides"], rest["quiet"]) == (("a=1",), True)
