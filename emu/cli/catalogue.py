"""What the catalogue knows of models and GPUs, as tables on the terminal or as JSON."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich import box
from rich.table import Table

from emu.backends.aiconfigurator.database import covered_pairs
from emu.catalogue import sizes
from emu.catalogue.checkpoints import split_name
from emu.catalogue.lookup import list_gpus, list_models, lookup_gpu, lookup_model
from emu.config.suggestions import did_you_mean
from emu.documents import Document
from emu.errors import InputError
from emu.latency.coefficients import kernels_of
from emu.process.console import open_console


def print_models(pattern: str = "", *, as_json: bool = False) -> None:
    """Every model whose name contains `pattern`, with what follows from its architecture."""
    names = _matching(list_models(), pattern, "models")
    if as_json:
        _print_json([_model_figures(name) for name in names])
        return
    table = _table("model", "params B", "active B", "layers", "GB", "KiB/token", "context")
    for name in names:
        figures = _model_figures(name)
        table.add_row(
            name,
            f"{figures['parameters'] / 1e9:.2f}",
            f"{figures['active_parameters'] / 1e9:.2f}",
            str(figures["layers"]),
            f"{figures['weight_bytes'] / 1e9:.1f}",
            f"{figures['kv_bytes_per_token'] / 1024:g}",
            str(figures["context_tokens"]),
        )
    console = open_console(100)
    console.print(table)
    console.print("GB: weights. KiB/token: KV cache of one token.")
    pairs = covered_pairs()
    covered = sorted({name for models in pairs.values() for name in models})
    if covered:
        console.print(f"latency.backend = aiconfigurator covers {len(covered)} models:")
        for name in covered:
            gpus = ", ".join(gpu for gpu, models in pairs.items() if name in models)
            console.print(f"  {name}: {gpus}", soft_wrap=True)


def _model_figures(name: str) -> Document:
    model = lookup_model(name)
    return {
        "name": name,
        "parameters": sizes.parameter_count(model),
        "active_parameters": sizes.active_parameter_count(model),
        "layers": model.layers,
        "weight_bytes": sizes.weight_bytes_per_rank(model),
        "kv_bytes_per_token": sizes.kv_bytes_per_token(
            model, sizes.kv_dtype(model, "auto", "auto")
        ),
        "context_tokens": model.max_position,
    }


def _matching(names: Sequence[str], pattern: str, what: str) -> list[str]:
    """Names that contain the pattern. Raises InputError if none does."""
    found = [name for name in names if pattern.casefold() in name.casefold()]
    if not found and what == "models" and split_name(pattern)[1]:
        found = [lookup_model(pattern, what, pattern).name]  # with the weights that the name says
    if not found:
        problem = f"no name contains it{did_you_mean(pattern, names)}"
        raise InputError(what, None, pattern, problem)
    return found


def _print_json(rows: object) -> None:
    print(msgspec.json.format(msgspec.json.encode(rows), indent=2).decode())


def _gpu_figures(name: str) -> Document:
    gpu = lookup_gpu(name)
    kernels = kernels_of(gpu)
    figures: Document = msgspec.to_builtins(gpu)
    return figures | {"uncertainty_percent": kernels.spread, "measured_on": kernels.measured}


def print_gpus(pattern: str = "", *, as_json: bool = False) -> None:
    """Every GPU whose name contains `pattern`, with its published figures."""
    names = _matching(list_gpus(), pattern, "gpus")
    if as_json:
        _print_json([_gpu_figures(name) for name in names])
        return
    table = _table("GPU", "GiB", "GB/s", "fp16 TF/s", "fp8 TF/s", "NVLink", "PCIe", "W", "+-%")
    for name in names:
        gpu = lookup_gpu(name)
        table.add_row(
            name,
            f"{gpu.memory_gib:g}",
            f"{gpu.memory_gbytes_per_s:g}",
            f"{gpu.tflops_fp16:g}",
            f"{gpu.tflops_fp8:g}" if gpu.tflops_fp8 else "-",
            f"{gpu.nvlink_gbps:g}" if gpu.nvlink_gbps else "-",
            f"{gpu.pcie_gbps:g}",
            f"{gpu.tdp_w:g}" if gpu.tdp_w else "-",
            f"{kernels_of(gpu).spread:g}",
        )
    console = open_console(100)
    console.print(table)
    console.print("fp16, fp8: dense TFLOP/s. NVLink, PCIe: Gbit/s each way.")
    console.print("+-%: uncertainty of a step's GPU time; 25 where no kernels were measured.")
    for name, models in covered_pairs().items():
        console.print(f"latency.backend = aiconfigurator covers {len(models)} models on {name}")


def _table(name: str, *figures: str) -> Table:
    """A table without inner rules: a name, then figures, none of them ever cut."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column(name, no_wrap=True)
    for figure in figures:
        table.add_column(figure, justify="right", no_wrap=True)
    return table
