"""How long a server starts, by phases: what is not the reading of weights. Pure.

process   from the start of the container or process to the engine's own settings
compile   graphs of the model traced and compiled, layer by layer; nothing where the engine runs
          eagerly or compiles nothing (SGLang, TensorRT-LLM)
profile   the run that measures memory, and what warms up
capture   graphs, each size for each layer

Reading and placing the weights depends on where they come from: loads do that on the emulated
links. Fitted to the phases that issues of vLLM report (cold-start.csv: a model of 28 layers, one of
40, one of 80 on 8 ranks): compilation is within 2 % of both that report it, capture within 10.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from emu.cluster.plan import ReplicaPlan
from emu.latency.engine import EngineModel, padded

PROCESS_S: Final = 16.0
PROFILE_S: Final = 10.0
COMPILE_LAYER_S: Final = 1.07
"""Tracing and compiling one layer, without a cache of compiled graphs."""
CACHED_LAYER_S: Final = 0.2
"""The same with one."""
CAPTURE_LAYER_S: Final = 0.01
"""Capturing one layer for one size."""


class StartUp(NamedTuple):
    """Seconds of each phase."""

    process_s: float
    compile_s: float
    profile_s: float
    capture_s: float

    @property
    def total_s(self) -> float:
        """All phases, without reading the weights."""
        return sum(self)

    def told(self) -> str:
        """The phases in words."""
        named = zip(("process", "compile", "profile", "capture"), self, strict=True)
        return ", ".join(f"{name} {seconds:.0f} s" for name, seconds in named)


def start_up(engine: EngineModel, layers: int, graph_limit: int, *, is_cached: bool) -> StartUp:
    """The phases of one server. `graph_limit`: the largest captured size; 0 = no graphs.

    `is_cached`: compiled graphs of an earlier start are there.
    """
    compiles = engine.graph_sizes == "vllm" and not engine.enforce_eager
    layer_s = CACHED_LAYER_S if is_cached else COMPILE_LAYER_S
    return StartUp(
        process_s=PROCESS_S,
        compile_s=layer_s * layers if compiles else 0.0,
        profile_s=PROFILE_S,
        capture_s=CAPTURE_LAYER_S * layers * captured_sizes(graph_limit, engine.graph_sizes),
    )


def start_up_of(replica: ReplicaPlan, *, is_cached: bool = False) -> StartUp | None:
    """The phases of a replica's server; None where it has no engine."""
    if replica.bound is None:
        return None
    engine, table = replica.bound.model, replica.scheduler
    limit = engine.graph_limit(table.requests_max, table.tokens_max)
    return start_up(engine, replica.model.layers, limit, is_cached=is_cached)


def captured_sizes(graph_limit: int, kind: str) -> int:
    """Number of sizes that are captured, of which `graph_limit` is the largest."""
    return len({padded(tokens, graph_limit, kind) for tokens in range(1, graph_limit + 1)})
