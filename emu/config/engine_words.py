"""Names and versions of serving engines: one spelling.

Those of other programs are read where their files are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from emu.config.suggestions import unknown_value


class EngineWords(msgspec.Struct, frozen=True):
    """What a configuration may say of one serving engine (`emu/engines/` models it)."""

    versions: tuple[str, ...]
    """Modeled, the oldest first."""
    policies: tuple[str, ...]
    """Values of `scheduler.policy` that are this engine's own; the first is its default."""
    made_by: str
    """Its versions as they are modeled: `module:NAME`."""

    @property
    def default(self) -> str:
        """The version where none is given: the newest."""
        return self.versions[-1]


ENGINES: Final[dict[str, EngineWords]] = {
    "vllm": EngineWords(
        versions=("0.11", "0.15", "0.19"), policies=("vllm",), made_by="emu.engines.vllm:VLLM"
    ),
    "sglang": EngineWords(
        versions=("0.5.3", "0.5.6", "0.5.9", "0.5.10", "0.5.14", "0.5.23"),
        policies=("sglang",),
        made_by="emu.engines.sglang:SGLANG",
    ),
    "tensorrt-llm": EngineWords(
        versions=("1.0", "1.1", "1.2", "1.3"),
        policies=("tensorrt-llm",),
        made_by="emu.engines.tensorrt_llm:TENSORRT_LLM",
    ),
}
"""Serving engines by name. Policies of no engine are those of simulators, and go with any."""


NO_ENGINE: Final = "none"
"""`engine.name` for kernels alone: no host, no graphs, no front end."""


_SPELLINGS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "trtllm": "tensorrt-llm",
        "trt-llm": "tensorrt-llm",
        "trt": "tensorrt-llm",
        "tensorrtllm": "tensorrt-llm",
        "tensorrt_llm": "tensorrt-llm",
        "tensorrt-llm": "tensorrt-llm",
        "sgl": "sglang",
        "sglang": "sglang",
        "vllm": "vllm",
    }
)


_VERSIONED: Final = r"([A-Za-z][A-Za-z_ -]*?)?(?:[ /@:=-]*v?(\d+(?:\.\d+)*)\S*)?"


def engine_label(name: str, version: str) -> str:
    """`vllm-0.15`: an engine of one version, as lines, tables and files call it."""
    return f"{name}-{version}" if version else name


def engine_words(text: str) -> tuple[str, str]:
    """(name, version) of an engine as programs write it; either is empty if the text lacks it.

    `vllm-0.15`, `vLLM 0.15.1`, `vllm==0.15.1`, `TRTLLM`, `0.15`: versions have two numbers, or as
    many as those of the engine that are modeled.
    """
    found = re.fullmatch(_VERSIONED, text.strip())
    if found is None:
        return text.strip(), ""
    word = (found.group(1) or "").strip().lower().replace(" ", "-")
    name = _SPELLINGS.get(word, word)
    numbers = ENGINES[name].default.count(".") + 1 if name in ENGINES else 2
    return name, ".".join((found.group(2) or "").split(".")[:numbers])


def engine_problem(name: str, version: str) -> tuple[str, str] | None:
    """(key, problem) of an engine that is not modeled; None if it is, or "none"."""
    if name == NO_ENGINE:
        return ("version", "engine none has no versions") if version else None
    if name not in ENGINES:
        problem = unknown_value(name, [*ENGINES, NO_ENGINE])
        meant = _SPELLINGS.get(name.casefold(), "")
        if meant:
            problem = f"{problem.partition('; did')[0]}; did you mean {meant}?"
        return "name", problem
    if version and version not in ENGINES[name].versions:
        known = ", ".join(ENGINES[name].versions)
        return "version", f'{name} "{version}" is not modeled; modeled are {known}'
    return None


def policy_problem(engine: str, policy: str) -> str:
    """Why an engine cannot run this scheduler; empty if it can.

    Kernels alone (engine none) go with every scheduler.
    """
    owners = [name for name, words in ENGINES.items() if policy in words.policies]
    if engine == NO_ENGINE or not owners or engine in owners:
        return ""
    own = " or ".join(f'"{name}"' for name in ENGINES[engine].policies)
    return f'"{policy}" is the scheduler of engine {" and ".join(owners)}; {engine} has {own}'


def engine_moved(value: object) -> str:
    """The problem text for `latency.engine`, where an engine was named before."""
    if value == NO_ENGINE:
        now = f'name = "{NO_ENGINE}"'
    elif isinstance(value, str) and value.endswith(".toml"):
        now = f'learned = "{value}"'
    elif isinstance(value, str) and engine_problem(*engine_words(value)) is None:
        name, version = engine_words(value)
        now = f'name = "{name}", version = "{version}"'
    else:
        now = "name, version, learned"
    return f"engines have a table of their own now: [engine] {now}"
