"""Whole forward passes: the roofline beside passes that the measured tables add up to.

`rows` yields one row for each (GPU, model, TP, batch): what the package `aiconfigurator-core` makes
of its tables (engine vLLM), and what emu says, GPU time without sampler. Weights as published.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec

from benchmarks.kernels.tables import SYSTEMS
from emu.catalogue import lookup_gpu, lookup_model
from emu.latency.base import BatchShape
from emu.latency.coefficients import Kernels
from emu.latency.roofline import RooflineBackend

MODELS: Final = (
    ("meta-llama/Meta-Llama-3.1-8B", "Llama-3.1-8B", (1, 2, 4, 8)),
    ("meta-llama/Meta-Llama-3.1-70B", "Llama-3.1-70B", (2, 4, 8)),
    ("Qwen/Qwen3-0.6B", "Qwen3-0.6B", (1,)),
    ("Qwen/Qwen3-8B", "Qwen3-8B", (1, 2)),
    ("Qwen/Qwen3-32B", "Qwen3-32B", (1, 2, 4, 8)),
    ("Qwen/Qwen3-30B-A3B", "Qwen3-30B-A3B", (1, 2, 4)),
    ("Qwen/Qwen3-235B-A22B", "Qwen3-235B-A22B", (4, 8)),
    ("openai/gpt-oss-20b", "gpt-oss-20b", (1, 2)),
    ("openai/gpt-oss-120b", "gpt-oss-120b", (1, 2, 4, 8)),
    ("deepseek-ai/DeepSeek-V3", "DeepSeek-V3", (8,)),
    ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "Llama-4-Scout-17B-16E", (4, 8)),
)
PROMPTS: Final = (128, 512, 2048, 8192)
DECODES: Final = (
    (1, 1024),
    (8, 1024),
    (32, 1024),
    (128, 1024),
    (256, 1024),
    (8, 32_768),
    (1, 131_072),
)
MIXED: Final = (1920, 128, 1024)


class Row(msgspec.Struct, frozen=True):
    """A forward pass, measured and emulated."""

    gpu: str
    model: str
    tp: int
    batch: str
    measured_ms: float
    emulated_ms: float

    @property
    def error(self) -> float:
        """Emulated over measured, less 1."""
        return self.emulated_ms / self.measured_ms - 1.0

    @property
    def name(self) -> str:
        """For a board."""
        return f"{self.gpu} {self.model} TP{self.tp} {self.batch}"

    @property
    def is_prompt(self) -> bool:
        """Whether the batch has a prompt."""
        return not self.batch.startswith("decode")

    @property
    def is_moe(self) -> bool:
        """Whether the model has experts."""
        return lookup_model(self.model).experts is not None


def rows(
    gpus: Sequence[str] = tuple(SYSTEMS), kernels: Callable[[str], Kernels | None] = lambda _: None
) -> Iterator[Row]:
    """The grid; `kernels` gives other coefficients than the shipped ones for a GPU."""
    logging.disable(logging.CRITICAL)
    from aiconfigurator_core import sdk

    for gpu in gpus:
        own = kernels(gpu)
        for theirs, ours, degrees in MODELS:
            for tp in degrees:
                try:
                    with contextlib.redirect_stderr(io.StringIO()):
                        handle = sdk.EngineHandle.compile(
                            theirs,
                            SYSTEMS[gpu],
                            "vllm",
                            tp_size=tp,
                            pp_size=1,
                            moe_tp_size=tp,
                            moe_ep_size=1,
                        )
                except (RuntimeError, ValueError, KeyError, OSError):
                    continue  # not in the tables
                backend = RooflineBackend(lookup_model(ours), lookup_gpu(gpu), tp=tp, kernels=own)
                yield from _of_model(handle, backend, (gpu, ours, tp))


def _of_model(handle: Any, backend: RooflineBackend, key: tuple[str, str, int]) -> Iterator[Row]:
    for batch, shape, ask in _batches(handle):
        try:
            measured_ms = float(ask())
        except (RuntimeError, ValueError, KeyError):
            continue  # a table has no such shape
        if not measured_ms > 0:
            continue
        parts = backend.components_ns(shape)
        emulated_ms = (sum(parts.values()) - parts["sampler"]) / 1e6
        yield Row(*key, batch, measured_ms, emulated_ms)


def _batches(handle: Any) -> Iterator[tuple[str, BatchShape, Callable[[], float]]]:
    for tokens in PROMPTS:
        yield (
            f"prompt {tokens}",
            _shape(tokens, 0, 0),
            lambda n=tokens: handle.predict_prefill_latency(1, n, 0),
        )
    for count, context in DECODES:
        yield (
            f"decode {count}x{context}",
            _shape(0, count, context),
            lambda n=count, c=context: handle.decode_step_latency(n, c, 2),
        )
    tokens, count, context = MIXED
    yield (
        f"mixed {tokens}+{count}",
        _shape(tokens, count, context),
        lambda: handle.mixed_step_latency(tokens, count, tokens, 2),
    )


def _shape(tokens: int, count: int, context: int) -> BatchShape:
    return BatchShape(
        prefill_new=[tokens] if tokens else [],
        prefill_context=[0] if tokens else [],
        decode_count=count,
        decode_context_sum=count * context,
        decode_context_max=context,
        decode_context_min=context,
        sequences=count + bool(tokens),
    )


def quantile(values: Iterable[float], part: float) -> float:
    """Nearest rank of the sorted values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def summary(found: Sequence[Row]) -> str:
    """One line: how many, signed median, median and 90th percentile of |error|, per cent."""
    errors = [100 * row.error for row in found]
    sizes = [abs(error) for error in errors]
    return (
        f"{len(found):5d} {quantile(errors, 0.5):+8.1f} {quantile(sizes, 0.5):8.1f} "
        f"{quantile(sizes, 0.9):8.1f} {max(sizes):8.1f}"
    )


def report(found: Sequence[Row]) -> None:
    """Print the errors by GPU, class, batch and degree."""
    print(f"{'':34} rows   median |median|      p90      max")
    print(f"{'all':34}{summary(found)}")
    groups: tuple[tuple[str, Callable[[Row], str]], ...] = (
        ("GPU", lambda row: row.gpu),
        ("class", _class),
        ("batch", lambda row: f"{'MoE' if row.is_moe else 'dense'} {row.batch}"),
        ("model", lambda row: row.model),
        ("degree", lambda row: f"{row.gpu if row.gpu == 'L40S' else 'others'} TP {row.tp}"),
    )
    for title, key in groups:
        print(f"\nby {title}")
        for name in sorted({key(row) for row in found}):
            print(f"  {name:32}{summary([row for row in found if key(row) == name])}")
    print("\nfurthest off")
    for row in sorted(found, key=lambda row: -abs(row.error))[:10]:
        print(f"  {100 * row.error:+6.0f} %  {row.name}  measured {row.measured_ms:.2f} ms")


def _class(row: Row) -> str:
    return f"{'MoE' if row.is_moe else 'dense'} {'prompts' if row.is_prompt else 'decodes'}"
