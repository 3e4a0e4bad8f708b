"""Draws of keys that came late, by a stream of their own, so that all other worlds stay."""

from __future__ import annotations

from emu.apps.chaos.worlds.drawing import Tables, chance, pick
from emu.apps.chaos.worlds.models import MODELS
from emu.config.engine_words import NO_ENGINE
from emu.config.kinds import KINDS
from emu.config.schema import RooflineTable, SchedulerTable, VidurTable
from emu.config.tables import tag_of
from emu.rng import rng_stream

_VIDUR = tuple(
    name for name, kind in KINDS[SchedulerTable].kinds.items() if issubclass(kind, VidurTable)
)
_KERNELS = {"nvfp4_experts": "cutlass", "fp8_block_products": "flashinfer"}
_LIKE = ("B200-SXM-180GB", "GB300", "RTXPRO6000")
_MXFP4 = "openai/gpt-oss-20b"
"""The drawn model whose experts are stored in 4 bits."""


def draw_later(seed: int, tables: Tables) -> None:
    """Where replicas are put, which may send weights, what words cost, which kernel experts run."""
    rng = rng_stream(seed, "chaos later")
    spreads = chance(rng, 0.15)
    encodes, widens, plans = chance(rng, 0.3), chance(rng, 0.9), chance(rng, 0.15)
    for group in tables.get("replicas", ()):
        if spreads and "gpus" not in group:
            group["place"] = "spread"
    if "autoscale" in tables and chance(rng_stream(seed, "chaos senders"), 0.4):
        tables["autoscale"]["prefill_never_sends"] = True
    latency = tables["latency"]
    own = rng_stream(seed, "chaos own GPUs")
    for node in tables["nodes"]:
        if isinstance(node["gpu"], dict) and chance(own, 0.5):
            node["gpu"] |= {"like": pick(own, _LIKE), "tflops_fp4": pick(own, (0.0, 1200.0))}
            if chance(own, 0.3):
                del node["gpu"]["sm_count"]
    if latency.get("backend") == tag_of(RooflineTable):
        has_engine = tables.get("engine", {}).get("name") != NO_ENGINE
        if encodes and has_engine and {"front_end", "host_overhead"}.isdisjoint(latency):
            latency["prompt_token_us"] = float(pick(rng, (0.0, 8.0, 100.0)))
        _draw_stream(seed, tables, has_engine=has_engine)
        kernels = rng_stream(seed, "chaos kernels")
        for key, word in _KERNELS.items():
            if chance(kernels, 0.1):
                latency[key] = word
        if widens and tables["model"].get("name") == _MXFP4:
            latency["mxfp4_experts"] = "marlin"
    is_dense = tables["model"].get("name") == MODELS[0].name
    if plans and is_dense and tables["scheduler"]["policy"] in _VIDUR:
        tables["scheduler"]["memory_margin_fraction"] = float(pick(rng, (0.1, 0.3)))


def _draw_stream(seed: int, tables: Tables, *, has_engine: bool) -> None:
    """Tokens between two output events of a request, where a front end sends them."""
    rng = rng_stream(seed, "chaos stream interval")
    sends = has_engine and {"front_end", "host_overhead"}.isdisjoint(tables["latency"])
    if sends and chance(rng, 0.2):
        tables.setdefault("engine", {})["stream_interval"] = pick(rng, (2, 10, 50))
