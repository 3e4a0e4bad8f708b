"""`python -m benchmarks.kernels COMMAND`.

`fit` fits the coefficients to the measured tables and writes them; `surfaces` then writes what is
left between tables and formulas, by engine and GPU. `grid` compares whole passes,
`grid --leave-out` with coefficients that were fitted without the GPU (its architecture's other GPU,
else the median of the other architectures). `layers FOLDER` compares Vidur's measured layers.
All but the last need `pip install aiconfigurator-core==0.12.0` (and `pandas`, `pyarrow`, `scipy`).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from benchmarks.kernels import fit
from benchmarks.kernels.grid import report, rows
from benchmarks.kernels.layers import rows as layer_rows
from benchmarks.kernels.surfaces import SYSTEMS as MEASURED
from benchmarks.kernels.surfaces import write_surfaces
from benchmarks.kernels.tables import SYSTEMS
from emu.catalogue import lookup_gpu
from emu.latency.coefficients import GENERIC, Kernels, all_kernels

ARCHITECTURES: Final = {
    "ampere": ("A100-SXM4-80GB",),
    "ada": ("L40S",),
    "hopper": ("H100-SXM5-80GB", "H200-SXM-141GB"),
    "blackwell": ("B200-SXM-180GB", "GB200"),
    "blackwell-rtx": ("RTXPRO6000",),
}
PRODUCT_TYPES: Final = {
    "ampere": ("bfloat16",),
    "blackwell": ("bfloat16", "fp8", "nvfp4"),
    "blackwell-rtx": ("bfloat16", "fp8", "nvfp4"),
}
PIECES_US: Final = 13.2
"""Of a layer in a step with a prompt: attention and what surrounds it start outside of captured
graphs. No table measures it; the package's own estimate of whole passes has this constant."""
ELEMENT_US: Final = 2.2
ELEMENT_MEMORY: Final = 0.8
"""Element-wise kernels: no table measures them."""
SPREAD: Final = {
    "ampere": 6.0,
    "ada": 12.0,
    "hopper": 9.0,
    "blackwell": 12.0,
    "blackwell-rtx": 7.0,
    GENERIC: 25.0,
}
"""Uncertainty of a pass, per cent: about two thirds of the grid's passes are within."""
OUT: Final = Path(__file__).parents[2] / "emu/latency/kernels.toml"


def fitted(gpus: tuple[str, ...], types: tuple[str, ...]) -> dict[str, Any]:
    """All coefficients of an architecture as plain values, and what is left."""
    residuals: dict[str, Any] = {}
    found: dict[str, Any] = {"products": {}, "experts": {}}
    for dtype in types:
        found["products"][dtype], residuals[f"products-{dtype}"] = fit.fit_products(gpus, dtype)
    found["decodes"], residuals["decodes"] = fit.fit_decodes(gpus)
    found["prompts"], residuals["prompts"] = fit.fit_prompts(gpus, found["decodes"])
    for dtype in fit.EXPERT_DTYPE:
        expert = fit.fit_experts(gpus, dtype)
        if expert is not None:
            found["experts"][dtype], residuals[f"experts-{dtype}"] = expert
    found["prompts"] = msgspec.structs.replace(
        found["prompts"], launch_us=round(found["prompts"].launch_us + PIECES_US, 3)
    )
    found["links"], residuals["links"] = fit.fit_links(gpus)
    found["residuals"] = residuals
    return msgspec.to_builtins(found)


def generic(sets: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the coefficients of all architectures."""

    def middle(parts: list[Any]) -> Any:
        if isinstance(parts[0], dict):
            keys = dict.fromkeys(key for part in parts for key in part)
            return {key: middle([part[key] for part in parts if key in part]) for key in keys}
        if isinstance(parts[0], str):
            return ""
        return float(f"{float(np.median(parts)):.4g}")

    return middle(sets)


def toml(name: str, values: dict[str, Any]) -> str:
    """A table and those below it."""
    plain = {key: value for key, value in values.items() if not isinstance(value, dict)}
    lines = [f"[{name}]"] if plain else []
    for key, value in plain.items():
        lines.append(f'{key} = "{value}"' if isinstance(value, str) else f"{key} = {value}")
    below = [
        toml(f"{name}.{key}", value) for key, value in values.items() if isinstance(value, dict)
    ]
    return "\n".join(lines + [""] * bool(lines)) + "\n".join(below)


def fitted_sets() -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Coefficients of each architecture and of GPUs of their own, and what is left."""
    sets: dict[str, dict[str, Any]] = {}
    residuals: dict[str, Any] = {}
    for name, gpus in ARCHITECTURES.items():
        # Where several GPUs of an architecture were measured, each has a set of its own besides.
        own = {gpu: (gpu,) for gpu in gpus} if len(gpus) > 1 else {}
        for key, members in {name: gpus, **own}.items():
            print(key, *members, file=sys.stderr, flush=True)
            found = fitted(members, PRODUCT_TYPES.get(name, ("bfloat16", "fp8")))
            residuals[key] = found.pop("residuals")
            found["measured"] = ", ".join(members)
            sets[key] = found
    return sets, residuals


def tables_of(
    sets: dict[str, dict[str, Any]], residuals: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """The shipped form of the sets: links by kind, the generic set, uncertainties."""
    families = [found for name, found in sets.items() if name in ARCHITECTURES]
    own_links = {name: sets[name]["links"] for name in sets if name in ARCHITECTURES}
    pcie = [links for links in own_links.values() if links["host_rank_us"] > 0]
    nvlink = [links for links in own_links.values() if not links["host_rank_us"] > 0]
    pcie, nvlink = pcie or nvlink, nvlink or pcie
    tables = {}
    for name in (*sets, GENERIC):
        found = dict(sets[name]) if name in sets else generic(families or list(sets.values()))
        links = found.pop("links")
        is_pcie = name in sets and links["host_rank_us"] > 0
        found["nvlink"] = links if name in sets and not is_pcie else generic(nvlink)
        found["pcie"] = links if is_pcie else generic(pcie)
        family = next((a for a, gpus in ARCHITECTURES.items() if name in gpus), name)
        head = {
            "spread": SPREAD.get(family, SPREAD[GENERIC]),
            "measured": found.pop("measured"),
            "element_us": ELEMENT_US,
            "element_memory": ELEMENT_MEMORY,
        }
        tables[name] = {**head, **found, "residuals": residuals.get(name, {})}
    return tables


def write_coefficients() -> None:
    """Fit and write."""
    text = [toml(name, table) for name, table in tables_of(*fitted_sets()).items()]
    intro = (
        "# Written by `python -m benchmarks.kernels fit`; coefficients.py says what each is.\n\n"
    )
    OUT.write_text(intro + "\n".join(text), encoding="utf-8")


def left_out(gpu: str) -> Kernels:
    """Coefficients that know nothing of a GPU.

    Its architecture's other GPU gives them; without one, the medians of the other architectures.
    """
    name = lookup_gpu(gpu).architecture
    others = tuple(other for other in ARCHITECTURES[name] if other != gpu)
    if others:
        found = fitted(others, PRODUCT_TYPES.get(name, ("bfloat16", "fp8")))
        found["measured"] = ", ".join(others)
        return msgspec.convert(tables_of({name: found}, {})[name], Kernels)
    shipped = {
        other: msgspec.to_builtins(kernels)
        for other, kernels in all_kernels().items()
        if other in ARCHITECTURES and other != name
    }
    for table in shipped.values():
        del table["residuals"]
    made = generic(list(shipped.values()))
    return msgspec.convert(made, Kernels)


def main() -> None:
    """Run a command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("fit")
    compare = commands.add_parser("grid")
    compare.add_argument("--gpu", action="append", choices=tuple(SYSTEMS))
    compare.add_argument("--leave-out", action="store_true")
    commands.add_parser("surfaces").add_argument("gpus", nargs="*", default=list(MEASURED))
    commands.add_parser("layers").add_argument("folder", type=Path)
    options = parser.parse_args()
    if options.command == "fit":
        write_coefficients()
    elif options.command == "surfaces":
        write_surfaces(options.gpus)
    elif options.command == "grid":
        gpus = tuple(options.gpu or SYSTEMS)
        report(list(rows(gpus, left_out) if options.leave_out else rows(gpus)))
    else:
        report(list(layer_rows(options.folder)))


if __name__ == "__main__":
    main()
