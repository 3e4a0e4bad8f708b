"""Tables of the catalogue for the terminal."""

from __future__ import annotations

from rich import box
from rich.table import Table

from emu.catalogue import sizes
from emu.catalogue.lookup import list_gpus, list_models, lookup_gpu, lookup_model
from emu.latency.aiconfigurator import covered_pairs
from emu.latency.roofline.coefficients import kernels_of
from emu.process.terminal import open_console


def print_models() -> None:
    """Every model with what follows from its architecture."""
    table = _table("model", "params B", "active B", "layers", "GB", "KiB/token", "context")
    for name in list_models():
        model = lookup_model(name)
        kv_dtype = sizes.kv_dtype(model, "auto", "auto")
        table.add_row(
            name,
            f"{sizes.parameter_count(model) / 1e9:.2f}",
            f"{sizes.active_parameter_count(model) / 1e9:.2f}",
            str(model.layers),
            f"{sizes.weight_bytes_per_rank(model) / 1e9:.1f}",
            f"{sizes.kv_bytes_per_token(model, kv_dtype) / 1024:g}",
            str(model.max_position),
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


def print_gpus() -> None:
    """Every GPU with its published figures."""
    table = _table("GPU", "GiB", "GB/s", "fp16 TF/s", "fp8 TF/s", "NVLink", "PCIe", "W", "+-%")
    for name in list_gpus():
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
