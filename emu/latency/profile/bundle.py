"""Profile bundles on disk: finding one, reading it, and saying what it lacks.

Owns the layout (LLMServingSim 2.0):

    ROOT/HARDWARE/MODEL/VARIANT/meta.yaml
    ROOT/HARDWARE/MODEL/VARIANT/tpN/{dense,per_sequence,attention,moe,skew_fit}.csv
    ROOT/architectures/ARCHITECTURE.yaml       (or architecture.yaml inside the bundle)

Everything that a user's bundle may lack or get wrong ends in an `InputError` that names the file,
the line and the field, and what there is instead. The rules of look-up are in `tables.py`, the
sum over an iteration in `backend.py`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from emu.documents import DocumentView
from emu.errors import InputError
from emu.latency.profile.csv_table import COUNT, NUMBER, TEXT, TIME_US, read_csv, read_header
from emu.latency.profile.skew import OLD_SKEW_AXES, SKEW_AXES, SkewAxes, SkewTable
from emu.latency.profile.tables import AttentionTable, Curve, ExpertTable
from emu.latency.profile.yaml_file import YamlFile

SECTIONS: Final = ("prologue", "pre_attn", "post_attn", "mlp_dense", "mlp_moe", "head")
CATEGORIES: Final = ("per_sequence", "attention", "moe", "dense")
"""In order of look-up: a layer belongs to the first category that lists it."""

_SHORT_DTYPES: Final = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "fp8": "fp8",
    "int8": "int8",
    "int4": "int4",
}


class Architecture(msgspec.Struct, frozen=True):
    """Which layers one iteration runs, in order, and which table times each."""

    sections: dict[str, tuple[str, ...]]
    category: dict[str, str]
    tp_stable: tuple[str, ...]
    """Layers that take the same time at every tensor-parallel degree (read from tp1)."""


class Bundle(msgspec.Struct, frozen=True):
    """What a bundle says for one tensor-parallel degree."""

    directory: str
    hardware: str
    model: str
    variant: str
    tensor_parallel: int
    architecture: Architecture
    dense: dict[str, Curve]
    per_sequence: dict[str, Curve]
    attention: AttentionTable
    skew: SkewTable | None
    """None: the bundle makes no correction for unequal histories."""
    experts: ExpertTable | None
    """None: the bundle has no expert table (a dense model)."""
    max_num_batched_tokens: int
    """Tokens of one iteration up to which the bundle was profiled; 0 = it does not say."""
    max_num_seqs: int
    """Sequences of one iteration up to which it was profiled; 0 = it does not say."""


def variant_name(dtype: str, kv_cache_dtype: str) -> str:
    """Folder of a (weight type, KV type) pair; both resolved, not `auto`."""
    short = _SHORT_DTYPES.get(dtype, dtype)
    return f"{short}-kvfp8" if kv_cache_dtype == "fp8" and dtype != "fp8" else short


def find_bundle(path: str | Path, *, hardware: str, model: str, variant: str) -> Path:
    """The directory of a bundle below a root, or `path` itself when it is one.

    Raises InputError that lists what there is when the hardware, model or variant is missing.
    """
    root = Path(path)
    if (root / "meta.yaml").is_file():
        meta = YamlFile(root / "meta.yaml")
        for field, wanted in (("model", model), ("variant", variant)):
            if meta.text(field) != wanted:
                raise meta.fail(field, f"the bundle is for {meta.text(field)}, not for {wanted}")
        return root
    if not root.is_dir():
        raise InputError(str(root), None, "latency.path", "no such directory")
    found = sorted(meta.parent for meta in root.rglob("meta.yaml"))
    exact = root / hardware / model / variant
    if exact in found:
        return exact
    names = [(d.relative_to(root).parts[0], d.parent.relative_to(root)) for d in found]
    if not found:
        raise InputError(str(root), None, "latency.path", "no bundle (meta.yaml) below it")
    if all(name != hardware for name, _ in names):
        have = ", ".join(sorted({name for name, _ in names}))
        raise InputError(
            str(root), None, "latency.hardware", f"no bundle for {hardware!r}; there is {have}"
        )
    here = [d for d, (name, _) in zip(found, names, strict=True) if name == hardware]
    models = sorted({str(d.parent.relative_to(root / hardware)) for d in here})
    if model not in models:
        problem = f"no bundle for {model!r} on {hardware}; there is {', '.join(models)}"
        raise InputError(str(root), None, "model.name", problem)
    variants = ", ".join(sorted(d.name for d in here if d.parent == root / hardware / model))
    problem = f"no variant {variant!r} of {model} on {hardware}; there is {variants}"
    raise InputError(str(root), None, "model.dtype", problem)


def read_bundle(directory: str | Path, tensor_parallel: int) -> Bundle:
    """Read and compile the tables of one tensor-parallel degree.

    Raises InputError for a missing degree, file, layer or column and for a malformed row.
    """
    directory = Path(directory)
    meta = YamlFile(directory / "meta.yaml")
    degrees = _degrees(directory)
    if tensor_parallel not in degrees:
        have = ", ".join(str(tp) for tp in degrees) or "none"
        problem = f"no folder tp{tensor_parallel}; this bundle has tensor_parallel {have}"
        raise InputError(str(directory), None, "tensor_parallel", problem)
    architecture = _read_architecture(directory, meta)
    curves = partial(_read_curves, directory, architecture, tensor_parallel, degrees)
    columns = dict.fromkeys(("prefill_chunk", "kv_prefill", "n_decode", "kv_decode"), COUNT)
    grid = directory / f"tp{tensor_parallel}" / "attention.csv"
    points = read_csv(grid, {**columns, "time_us": TIME_US})
    effective = meta.table("engine_effective", optional=True)
    return Bundle(
        directory=str(directory),
        hardware=meta.text("hardware"),
        model=meta.text("model"),
        variant=meta.text("variant"),
        tensor_parallel=tensor_parallel,
        architecture=architecture,
        dense=curves("dense", "tokens"),
        per_sequence=curves("per_sequence", "sequences"),
        attention=AttentionTable(points),
        skew=_read_skew(directory, meta, tensor_parallel),
        experts=_read_experts(directory, degrees),
        max_num_batched_tokens=meta.count(effective, "max_num_batched_tokens"),
        max_num_seqs=meta.count(effective, "max_num_seqs"),
    )


def _degrees(directory: Path) -> list[int]:
    names = [d.name.removeprefix("tp") for d in directory.glob("tp*") if d.is_dir()]
    return sorted(int(name) for name in names if name.isdecimal())


def _read_curves(
    directory: Path,
    architecture: Architecture,
    tensor_parallel: int,
    degrees: Sequence[int],
    category: str,
    count_column: str,
) -> dict[str, Curve]:
    """Curves of one category; layers that do not depend on the degree come from tp1."""
    columns = {"layer": TEXT, count_column: COUNT, "time_us": TIME_US}
    own = directory / f"tp{tensor_parallel}" / f"{category}.csv"
    curves = _curves(read_csv(own, columns))
    stable = [layer for layer in architecture.tp_stable if architecture.category[layer] == category]
    if tensor_parallel != 1 and 1 in degrees and stable:
        of_one = _curves(read_csv(directory / "tp1" / f"{category}.csv", columns))
        curves |= {layer: of_one[layer] for layer in stable if layer in of_one}
    for names in architecture.sections.values():
        for layer in names:
            if architecture.category[layer] == category and layer not in curves:
                problem = f"no rows for {layer!r}; the file has {', '.join(sorted(curves))}"
                raise InputError(str(own), None, "layer", problem)
    return curves


def _curves(rows: Sequence[tuple[Any, ...]]) -> dict[str, Curve]:
    points: dict[str, list[tuple[int, int]]] = {}
    for layer, count, ns in rows:
        points.setdefault(layer, []).append((count, ns))
    return {layer: Curve(of_layer) for layer, of_layer in points.items()}


def _read_experts(directory: Path, degrees: Sequence[int]) -> ExpertTable | None:
    """The expert table of the smallest degree that has one (tp1 in every bundle we know)."""
    for tp in degrees:
        path = directory / f"tp{tp}" / "moe.csv"
        if path.is_file():
            columns = {"tokens": COUNT, "activated_experts": COUNT, "time_us": TIME_US}
            return ExpertTable(read_csv(path, columns))
    return None


def _read_architecture(directory: Path, meta: YamlFile) -> Architecture:
    name = meta.text("architecture")
    inside = directory / "architecture.yaml"
    places = [inside, *(p / "architectures" / f"{name}.yaml" for p in directory.absolute().parents)]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        problem = f"no architectures/{name}.yaml in or above {directory}, no architecture.yaml here"
        raise meta.fail("architecture", problem)
    return parse_architecture(path)


def parse_architecture(path: Path) -> Architecture:
    """Read an architecture file: the sequence of layers and their categories."""
    file = YamlFile(path)
    catalog = file.table("catalog")
    category: dict[str, str] = {}
    stable: list[str] = []
    for kind in CATEGORIES:
        layers = catalog.get(kind) or {}
        if not isinstance(layers, dict):
            raise file.fail(f"catalog.{kind}", "expected a mapping of layers")
        for layer, facts in layers.items():
            if layer in category:
                continue
            category[layer] = kind
            if isinstance(facts, dict) and facts.get("tp_stable") is True:
                stable.append(layer)
    sequence = file.table("sequence")
    sections: dict[str, tuple[str, ...]] = {}
    for section in SECTIONS:
        layers = sequence.get(section) or []
        if not isinstance(layers, list):
            raise file.fail(f"sequence.{section}", "expected a list of layers")
        for layer in layers:
            if layer not in category:
                problem = f"{layer!r} is not in the catalog; it has {', '.join(sorted(category))}"
                raise file.fail(f"sequence.{section}", problem)
        sections[section] = tuple(layers)
    unknown = sorted(set(sequence) - set(SECTIONS))
    if unknown:
        problem = f"unknown section {unknown[0]!r}; known: {', '.join(SECTIONS)}"
        raise file.fail("sequence", problem)
    return Architecture(sections=sections, category=category, tp_stable=tuple(stable))


def _read_skew(directory: Path, meta: YamlFile, tensor_parallel: int) -> SkewTable | None:
    fit = meta.table("skew_fit", optional=True)
    if not fit.get("enabled"):
        return None
    field = "skew_fit.per_tp"
    per_tp = meta.mapping(fit.get("per_tp", {}), field)
    own = per_tp.get(tensor_parallel, per_tp.get(str(tensor_parallel)))
    if own is None:
        return None
    field = f"{field}.{tensor_parallel}"
    own = meta.mapping(own, field)
    default = meta.number(own.get("alpha_default", 0), f"{field}.alpha_default")
    inline, table = own.get("alpha_by_bucket"), own.get("bucket_table")
    if inline is not None:
        field = f"{field}.alpha_by_bucket"
        source, entries = str(meta.path), meta.mapping(inline, field).items()
        by_key = {str(key): meta.number(alpha, field) for key, alpha in entries}
    elif table is not None:
        source = str(directory / str(table))
        by_key = _read_buckets(directory / str(table))
    else:
        source, by_key = str(meta.path), {}
    for key in by_key:
        if not re.match(r"pc=\d+\|", key):
            raise InputError(source, None, field, f"{key!r} does not start with pc=N|")
    return SkewTable(_skew_axes(meta, fit), by_key, default)


def _skew_axes(meta: YamlFile, fit: DocumentView) -> SkewAxes:
    if not fit.get("bucket_axes"):
        return OLD_SKEW_AXES
    axes = meta.mapping(fit["bucket_axes"], "skew_fit.bucket_axes")
    found = {}
    for axis in SKEW_AXES:
        edges, labels = axes.get(f"{axis}_bins"), axes.get(f"{axis}_labels")
        field = f"skew_fit.bucket_axes.{axis}_bins"
        if not isinstance(edges, list) or not isinstance(labels, list):
            raise meta.fail(field, "missing, or not a list beside its labels")
        numbers = [meta.number(edge, field) for edge in edges]
        if len(numbers) != len(labels) + 1 or numbers != sorted(numbers):
            raise meta.fail(field, "expected rising edges, one more than there are labels")
        found[axis] = (numbers, [str(label) for label in labels])
    return SkewAxes(found)


def _read_buckets(path: Path) -> dict[str, float]:
    """Fitted fractions by bucket key; a `raw_key` column, where there is one, overrides the key."""
    labels = ("n_label", "skew_rate_label", "kv_big_label", "kp_label")
    columns = {"pc": COUNT, **dict.fromkeys(labels, TEXT), "alpha": NUMBER}
    if "raw_key" in read_header(path):
        columns["raw_key"] = TEXT
    by_key: dict[str, float] = {}
    for pc, n, rate, big, kp, alpha, *raw in read_csv(path, columns):
        by_key[raw[0] if raw and raw[0] else f"pc={pc}|{n}|{rate}|{big}|{kp}"] = alpha
    return by_key
