"""`python -m benchmarks.kernels fit`: fits the coefficients and writes them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from benchmarks.kernels import fit
from emu.latency.roofline.coefficients import GENERIC

ARCHITECTURES: Final = {
    "ampere": ("A100-SXM4-80GB",),
    "ada": ("L40S",),
    "hopper": ("H100-SXM5-80GB", "H200-SXM-141GB"),
    "blackwell": ("B200-SXM-180GB", "GB200"),
    "blackwell-rtx": ("RTXPRO6000",),
}
PRODUCT_TYPES: Final = {"ampere": ("bfloat16",), "blackwell": ("bfloat16", "fp8", "mxfp4")}
OUT: Final = Path(__file__).parents[2] / "emu/latency/roofline/kernels.toml"


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
    found["links"], residuals["links"] = fit.fit_links(gpus)
    found["residuals"] = residuals
    return msgspec.to_builtins(found)


def generic(sets: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the coefficients of all architectures."""

    def middle(parts: list[Any]) -> Any:
        if isinstance(parts[0], dict):
            keys = dict.fromkeys(key for part in parts for key in part)
            return {key: middle([part[key] for part in parts if key in part]) for key in keys}
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


def main() -> None:
    sets: dict[str, dict[str, Any]] = {}
    residuals: dict[str, Any] = {}
    for name, gpus in ARCHITECTURES.items():
        print(name, file=sys.stderr, flush=True)
        found = fitted(gpus, PRODUCT_TYPES.get(name, ("bfloat16", "fp8")))
        residuals[name] = found.pop("residuals")
        sets[name] = found
    nvlink = [
        found["links"]
        for found in sets.values()
        if "host_rank_us" not in found["links"] or not found["links"]["host_rank_us"]
    ]
    pcie = [found["links"] for found in sets.values() if found["links"].get("host_rank_us")]
    text = []
    for name, found in [*sets.items(), (GENERIC, {})]:
        found = found or generic(
            [{k: v for k, v in x.items() if k not in ("links",)} for x in sets.values()]
        )
        links = found.pop("links", None)
        own_pcie = links is not None and links["host_rank_us"] > 0
        found["nvlink"] = generic(nvlink) if links is None or own_pcie else links
        found["pcie"] = links if own_pcie else generic(pcie)
        # No table has element-wise kernels of their own: see the profiles of layers.
        left = residuals.get(name, {})
        # Of an iteration: what is left of its kernels, as far as it does not average out.
        spread = 10.0 if name != GENERIC else 25.0
        head = {
            "spread": spread,
            "measured": ", ".join(ARCHITECTURES.get(name, ())),
            "element_us": 2.2,
            "element_memory": 0.8,
        }
        text.append(toml(name, {**head, **found, "residuals": left}))
    intro = (
        "# Written by `python -m benchmarks.kernels fit`; coefficients.py says what each is.\n\n"
    )
    OUT.write_text(intro + "\n".join(text), encoding="utf-8")


if __name__ == "__main__":
    main()
