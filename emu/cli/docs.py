"""What emu knows as tables: on the terminal, and as the generated pages under `docs/`.

`python -m emu.cli.docs` (`make docs`) rewrites the pages.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

import msgspec
from msgspec import inspect

from emu.apps.sweeps import sweepfile
from emu.catalogue import sizes
from emu.catalogue.lookup import list_gpus, list_models, lookup_gpu, lookup_model
from emu.cli.commands import COMMANDS, HEADINGS
from emu.cli.parser import parser_of
from emu.config.docs import config_schema, key_table, reference_markdown
from emu.config.faultkinds import FAULT_KINDS
from emu.features.page import features_markdown
from emu.latency.coefficients import kernels_of
from emu.replica.states import mermaid

DOCS: Final = Path(__file__).resolve().parents[2] / "docs"
_CLI_INTRO: Final = """\
# Command line

Every command and option. This page is generated from `emu/cli/`.

Exit status: 0 done; 1 an internal fault; 2 wrong input, told in one line on stderr; 3 the run could
not continue (deadlock, limit); 4 an invariant of emu was violated; 130 interrupted (partial results
are kept). Results go to stdout, everything else to stderr; `NO_COLOR` is respected.

"""
_STATES = re.compile(r"(<!-- generated: states -->\n```mermaid\n).*?(\n```)", re.DOTALL)

_KINDS = re.compile(r"(<!-- generated: kinds -->\n\n).*?(\n\n<!-- end of kinds -->)", re.DOTALL)


def cli_markdown() -> str:
    """Every command with its options."""
    parts = [_CLI_INTRO]
    for heading, group in HEADINGS.items():
        links = ", ".join(f"[`{path}`](#emu-{path.replace(' ', '-')})" for path in group)
        parts.append(f"- {heading}: {links}\n")
    for path, command in COMMANDS.items():
        parts.append(f"\n## emu {path}\n\n```\n{parser_of(path, command).format_help()}```\n")
    return "".join(parts)


def sweep_markdown() -> str:
    """Keys of a sweep file."""
    parts = [
        "# Sweep files\n\nEvery table and key of a sweep file. This page is generated from "
        "`emu/apps/sweeps/sweepfile.py`; how to use\nthem stands in [sweeps](../sweeps.md).\n\n"
        "Exactly one of `[grid]`, `[[list]]`, `[random]`, `[search]` and `[pareto]` is given. "
        "`[grid]` maps dotted\nkeys to arrays of values, each `[[list]]` table is one point. "
        "Paths are relative to the file.\n"
    ]
    for title, struct in (
        ("Top level", sweepfile.Sweep),
        ("`[search]`", sweepfile.SearchTable),
        ("`[random]`", sweepfile.RandomTable),
        ("`[pareto]`", sweepfile.ParetoTable),
        ("Ranges (values of `keys`)", sweepfile.RangeTable),
        ("`[plot]`", sweepfile.PlotTable),
    ):
        kind = inspect.type_info(struct)
        assert isinstance(kind, inspect.StructType)
        doc = (struct.__doc__ or "").splitlines()[0]
        parts.append(f"\n## {title}\n\n{doc}\n{key_table(kind)}")
    return "".join(parts)


def catalogue_markdown() -> str:
    """Models and GPUs with what follows from their figures."""
    lines = [
        "# Catalogue",
        "",
        "Models and GPUs that a configuration can name (`model.name`, `nodes.gpu`). This page",
        "is generated from `emu/catalogue/`. Any other model comes from its Hugging Face",
        "`config.json` (`model.hf_config`), any other GPU from an inline table of figures.",
        "",
        "## Models",
        "",
        "| name | parameters | active | layers | weights, GB | KV per token, KiB | context |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in list_models():
        model = lookup_model(name)
        kv_dtype = sizes.kv_dtype(model, "auto", "auto")
        lines.append(
            f"| `{name}` | {sizes.parameter_count(model) / 1e9:.2f} B "
            f"| {sizes.active_parameter_count(model) / 1e9:.2f} B | {model.layers} "
            f"| {sizes.weight_bytes_per_rank(model) / 1e9:.1f} "
            f"| {sizes.kv_bytes_per_token(model, kv_dtype) / 1024:.1f} | {model.max_position:,} |"
        )
    lines += [
        "",
        "## GPUs",
        "",
        "| name | memory, GiB | bandwidth, GB/s | fp16, TFLOP/s | fp8, TFLOP/s "
        "| NVLink, Gbit/s | PCIe, Gbit/s | uncertainty, % | kernels measured on |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in list_gpus():
        gpu = lookup_gpu(name)
        kernels = kernels_of(gpu)
        lines.append(
            f"| `{name}` | {gpu.memory_gib:g} | {gpu.memory_gbytes_per_s:g} "
            f"| {gpu.tflops_fp16:g} | {gpu.tflops_fp8 or '-':{'g' if gpu.tflops_fp8 else ''}} "
            f"| {gpu.nvlink_gbps or '-':{'g' if gpu.nvlink_gbps else ''}} | {gpu.pcie_gbps:g} "
            f"| {kernels.spread:g} | {kernels.measured or '-'} |"
        )
    return "\n".join(lines) + "\n"


def schema_text(kind: str) -> str:
    """The JSON Schema of one kind of file: cluster or sweep."""
    if kind == "cluster":
        return json.dumps(config_schema(), indent=2) + "\n"
    document = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "emu sweep",
        **msgspec.json.schema(sweepfile.Sweep),
    }
    return json.dumps(document, indent=2) + "\n"


PAGES: Final[Mapping[str, Callable[[], str]]] = MappingProxyType(
    {
        "reference/config.md": reference_markdown,
        "reference/cli.md": cli_markdown,
        "reference/sweep.md": sweep_markdown,
        "reference/catalogue.md": catalogue_markdown,
        "reference/features.md": features_markdown,
        "reference/cluster.schema.json": lambda: schema_text("cluster"),
        "reference/sweep.schema.json": lambda: schema_text("sweep"),
    }
)


def states_markdown(text: str) -> str:
    """The page of states with the diagram as the table has it."""
    return _STATES.sub(lambda match: match.group(1) + mermaid() + match.group(2), text)


def kinds_table() -> str:
    """The kinds of faults: numbers, keys, what happens."""
    lines = [
        "| kind | catalogue | target | strength | duration | what happens |",
        "|---|---|---|---|---|---|",
    ]
    for name, kind in FAULT_KINDS.items():
        groups = [" or ".join([f"`{key}`" for key in group]) for group in kind.one_of]
        if kind.may:
            groups.append(", ".join(f"`{key}`" for key in kind.may) + " (optional)")
        bounds = kind.magnitude
        size = f"`{kind.size}`, {bounds[0]:g} to {bounds[1]:g}" if bounds else ""
        size += " (optional)" if kind.may_magnitude else ""
        lasts = "yes" if kind.takes_duration else "instant"
        cells = [" and ".join(groups), size, "needed" if kind.needs_duration else lasts, kind.text]
        lines.append(" | ".join([f"| `{name}`", kind.numbers, *cells]) + " |")
    return "\n".join(lines)


def faults_markdown(text: str) -> str:
    """The page of faults with the kinds as the catalogue has them."""
    return _KINDS.sub(lambda match: match.group(1) + kinds_table() + match.group(2), text)


PARTS: Final[Mapping[str, Callable[[str], str]]] = MappingProxyType(
    {"lab/states.md": states_markdown, "faults.md": faults_markdown}
)
"""Pages of which a part is generated."""


def main() -> int:
    """Rewrite what is not as generated; tell which pages."""
    fresh = {DOCS / name: make() for name, make in PAGES.items()}
    for name, make in PARTS.items():
        fresh[DOCS / name] = make((DOCS / name).read_text(encoding="utf-8"))
    for path, text in fresh.items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"{path.relative_to(DOCS.parent)} rewritten")
    return 0


if __name__ == "__main__":
    sys.exit(main())
