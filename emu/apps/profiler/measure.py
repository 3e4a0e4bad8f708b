"""One measurement, within a time budget.

The coarse grid is measured whatever the budget; finer points follow until it is spent. A point
whose KV does not fit into the device's memory is left out, and `meta.yaml` says how many.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Protocol

import msgspec

from emu.apps.profiler.files import Times, write_attention, write_curves, write_yaml
from emu.apps.profiler.grid import COARSE, AttentionPoint, Limits, in_levels
from emu.apps.profiler.kernels import STAND_INS, Kernels
from emu.apps.profiler.shapes import SEQUENCE_LAYERS, Shapes, architecture, dense_layers, shapes_of
from emu.apps.profiler.timers import Call, CpuTimer, CudaTimer, Timer
from emu.catalogue.lookup import device_words, gpu_of_device, lookup_model, model_from_file
from emu.catalogue.model import ModelSpec
from emu.errors import InputError, install_hint


class ProfileOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the user asks for."""

    model: str = "meta-llama/Llama-3.1-8B"
    hf_config: str = ""
    out: str = "bundles"
    hardware: str = ""
    tp: tuple[int, ...] = (1,)
    device: str = ""
    """cuda or cpu; empty = cuda if there is one."""
    budget_s: float = 360.0
    repeats: int = 5
    limits: Limits = Limits()


class Operations(Protocol):
    """The calls of one rank (`kernels.Kernels`)."""

    def layer(self, name: str, count: int) -> Call: ...

    def attention(self, point: AttentionPoint) -> Call: ...

    def kv_tokens(self, point: AttentionPoint) -> int: ...

    def reserve(self, tokens: int) -> None: ...


class Tables(msgspec.Struct):
    """What one rank's measurement found; us."""

    dense: Times = msgspec.field(default_factory=dict)
    per_sequence: Times = msgspec.field(default_factory=dict)
    attention: dict[AttentionPoint, float] = msgspec.field(default_factory=dict)
    left_out: int = 0
    """Points whose KV is too large."""
    level: int = COARSE
    """The finest level that is complete."""


def measure(
    shapes: Shapes,
    operations: Operations,
    timer: Timer,
    limits: Limits,
    *,
    kv_tokens_max: int,
    is_time_left: Callable[[], bool],
    out_of_memory: tuple[type[BaseException], ...] = (MemoryError,),
) -> Tables:
    """Time the points of one rank, coarse ones first, as long as there is time.

    Points of attention that need more memory than there is are left out.
    """
    tables = Tables()
    operations.reserve(kv_tokens_max)
    of_level: dict[AttentionPoint, float] = {}
    for level, table, point in in_levels(limits):
        if level != tables.level:
            tables.attention |= of_level
            tables.level, of_level = level, {}
        if level != COARSE and not is_time_left():
            # Attention is looked up by slices of the grid: one with gaps would mislead.
            tables.level -= 1
            return tables
        if table == "attention":
            assert isinstance(point, tuple)
            if operations.kv_tokens(point) > kv_tokens_max:
                tables.left_out += 1
            else:
                try:
                    of_level[point] = timer.time_us(operations.attention(point))
                except out_of_memory:
                    tables.left_out += 1
            continue
        assert isinstance(point, int)
        is_dense = table == "dense"
        found = tables.dense if is_dense else tables.per_sequence
        for layer in dense_layers(shapes) if is_dense else SEQUENCE_LAYERS:
            found[layer, point] = timer.time_us(operations.layer(layer, point))
    tables.attention |= of_level
    return tables


def profile(options: ProfileOptions) -> Path:
    """Measure and write a bundle; its directory. Raises InputError for what cannot be measured."""
    spec = _spec(options)
    shapes = {tp: shapes_of(spec, tp) for tp in options.tp}
    torch = import_torch()

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("profile", None, "--device", "PyTorch sees no CUDA device")
    name = torch.cuda.get_device_name(0) if device == "cuda" else "CPU"
    hardware = options.hardware or hardware_name(name)
    directory = Path(options.out) / hardware / spec.name / "bf16"
    start = time.monotonic()
    known: dict[str, object] = {}
    with torch.inference_mode():
        for index, (tp, rank) in enumerate(shapes.items(), start=1):
            deadline = start + options.budget_s * index / len(shapes)
            kernels = Kernels(torch, rank, device=device, dtype=torch.bfloat16)
            timer: Timer = CpuTimer(options.repeats)
            if device == "cuda":
                timer = CudaTimer(torch, options.repeats)
                torch.cuda.empty_cache()  # of the degree before
            tables = measure(
                rank,
                kernels,
                timer,
                options.limits,
                kv_tokens_max=_kv_tokens_max(torch, device, rank, options.limits),
                is_time_left=lambda end=deadline: time.monotonic() < end,  # type: ignore[misc]
                out_of_memory=(MemoryError, torch.cuda.OutOfMemoryError),
            )
            _write_tables(directory / f"tp{tp}", tables)
            known[f"tp{tp}"] = {
                "finest_complete_level": tables.level,
                "attention_points_left_out": tables.left_out,
            }
            known["kernels"] = {**STAND_INS, "attention": kernels.attention_kernel}
            print(_summary(tp, tables, time.monotonic() - start), file=sys.stderr, flush=True)
            del kernels, timer
    write_yaml(directory / "architecture.yaml", architecture(shapes[options.tp[0]]))
    took_s = time.monotonic() - start
    write_yaml(directory / "meta.yaml", _meta(options, spec, hardware, name, torch, took_s) | known)
    return directory


def degrees(text: str) -> tuple[int, ...]:
    """`1,2,4` as numbers. Raises InputError."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise InputError("profile", None, "--tp", f"expected numbers such as 1,2, got {text!r}")
    return found


def import_torch() -> ModuleType:
    """PyTorch, or an InputError that names the extra."""
    try:
        import torch
    except ImportError:
        problem = f"PyTorch is not installed: {install_hint('profiler')}"
        raise InputError("profile", None, "torch", problem) from None
    found: ModuleType = torch
    return found


def hardware_name(device: str) -> str:
    """The catalogue's name of a device, or the device's own as a folder name."""
    spec = gpu_of_device(device)
    plain = re.sub(r"[^A-Za-z0-9.-]+", "-", "-".join(device_words(device)))
    return spec.name if spec is not None else plain or "GPU"


def _spec(options: ProfileOptions) -> ModelSpec:
    if options.hf_config:
        return model_from_file(Path(options.hf_config), options.model)
    return lookup_model(options.model, "profile", "--model")


def _kv_tokens_max(torch: ModuleType, device: str, shapes: Shapes, limits: Limits) -> int:
    """KV that any point may read: all sequences at the longest context, or half of what is free."""
    most = limits.max_sequences * (limits.max_context + 1) + limits.max_tokens + limits.max_context
    if device == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info()
    else:
        free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # Keys and values of two bytes; without grouped heads they are repeated once more.
    return min(most, int(free_bytes * 0.5) // (4 * shapes.kv_width))


def _write_tables(folder: Path, tables: Tables) -> None:
    write_curves(folder / "dense.csv", "tokens", tables.dense)
    write_curves(folder / "per_sequence.csv", "sequences", tables.per_sequence)
    write_attention(folder / "attention.csv", tables.attention)


def _meta(
    options: ProfileOptions,
    spec: ModelSpec,
    hardware: str,
    device: str,
    torch: ModuleType,
    took_s: float,
) -> dict[str, object]:
    limits = options.limits
    return {
        "profiler": "emu",
        "gpu": device,
        "hardware": hardware,
        "profiled_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch_version": str(torch.__version__),
        "cuda_version": str(torch.version.cuda),
        "architecture": spec.model_type,
        "model": spec.name,
        "variant": "bf16",
        "tp_degrees": list(options.tp),
        "engine_effective": {
            "max_num_batched_tokens": limits.max_tokens,
            "max_num_seqs": limits.max_sequences,
        },
        "attention_grid": {"max_kv": limits.max_context},
        "measurement_iterations": options.repeats,
        "took_s": round(took_s, 1),
        "skew_fit": {"enabled": False},
    }


def _summary(tp: int, tables: Tables, took_s: float) -> str:
    return (
        f"tp{tp}: {len(tables.dense)} dense, {len(tables.per_sequence)} per sequence, "
        f"{len(tables.attention)} attention points in {took_s:.0f} s"
    )
