"""Tables of the catalogue for the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from emu.catalogue import sizes
from emu.catalogue.lookup import list_gpus, list_models, lookup_gpu, lookup_model
from emu.latency.aiconfigurator import covered_pairs


def print_models() -> None:
    """Every model with what follows from its architecture."""
    table = Table(title="models")
    for column in ("name", "parameters", "active", "layers", "weights", "KV per token", "context"):
        table.add_column(
            column,
            justify="left" if column == "name" else "right",
            no_wrap=column == "name",
        )
    for name in list_models():
        model = lookup_model(name)
        kv_dtype = sizes.kv_dtype(model, "auto", "auto")
        table.add_row(
            name,
            f"{sizes.parameter_count(model) / 1e9:.2f} B",
            f"{sizes.active_parameter_count(model) / 1e9:.2f} B",
            str(model.layers),
            f"{sizes.weight_bytes_per_rank(model) / 1e9:.1f} GB",
            f"{sizes.kv_bytes_per_token(model, kv_dtype) / 1024:.1f} KiB",
            str(model.max_position),
        )
    console = Console(width=None)
    console.print(table)
    pairs = covered_pairs()
    covered = sorted({name for models in pairs.values() for name in models})
    if covered:
        console.print(f"latency.backend = aiconfigurator covers {len(covered)} models:")
        for name in covered:
            gpus = ", ".join(gpu for gpu, models in pairs.items() if name in models)
            console.print(f"  {name}: {gpus}", soft_wrap=True)


def print_gpus() -> None:
    """Every GPU with its published figures."""
    table = Table(title="GPUs")
    for column in ("name", "memory", "bandwidth", "fp16", "fp8", "NVLink", "PCIe", "TDP"):
        table.add_column(
            column,
            justify="left" if column == "name" else "right",
            no_wrap=column == "name",
        )
    for name in list_gpus():
        gpu = lookup_gpu(name)
        table.add_row(
            name,
            f"{gpu.memory_gib:g} GiB",
            f"{gpu.memory_gbytes_per_s:g} GB/s",
            f"{gpu.tflops_fp16:g} TFLOP/s",
            f"{gpu.tflops_fp8:g} TFLOP/s" if gpu.tflops_fp8 else "-",
            f"{gpu.nvlink_gbps:g} Gbit/s" if gpu.nvlink_gbps else "-",
            f"{gpu.pcie_gbps:g} Gbit/s",
            f"{gpu.tdp_w:g} W" if gpu.tdp_w else "-",
        )
    console = Console()
    console.print(table)
    for name, models in covered_pairs().items():
        console.print(f"latency.backend = aiconfigurator covers {len(models)} models on {name}")
