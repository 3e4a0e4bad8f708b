"""Finding a model or a GPU by the name that a user wrote.

Owns the reading of `models.toml` and `gpus.toml` and the rules of names: case, `_` for `-`, the
owner before the slash and suffixes such as `-Instruct` make no difference, while one such as
`-FP8` says how weights are stored (`checkpoints.py`). The files are read once for each process;
their content is constant.

A run asks for two or three of the hundred tables, and parsing them all would take a third of its
start. So the text is cut at the headings, and a table is parsed when it is wanted. That relies on
the form of the two files (a test compares with parsing them whole): a table begins with a line
`["NAME"]`, has no sub-tables, and its `aliases`, if any, are one line that is JSON as well.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

import msgspec

from emu.catalogue.checkpoints import as_named, split_name
from emu.catalogue.gpu import GpuSpec
from emu.catalogue.hf_config import from_hf_config
from emu.catalogue.model import (
    ModelSpec,
)
from emu.config.input_files import read_input
from emu.errors import InputError
from emu.process.prepared import prepared

_HERE: Final = Path(__file__).parent
_MODELS: Final = "models.toml"
_GPUS: Final = "gpus.toml"
_MAKERS: Final = ("nvidia", "geforce", "tesla", "amd", "instinct", "graphics", "device")
_OF_ALL: Final = re.compile(r"\d+GB|HBM\w*|Blackwell|Server|Workstation|Edition", re.IGNORECASE)
# Releases of one architecture under another name.
SUFFIXES: Final = ("-instruct", "-chat", "-base", "-hf", "-it", "-thinking")


def lookup_model(name: str, source: str = "catalogue", field: str = "model.name") -> ModelSpec:
    """The model of a name or alias, with the weights that the name says (`-FP8`, `-AWQ`).

    InputError (at `source`, `field`) with the nearest names.
    """
    names = _names(_MODELS)
    for key in _spellings(name):
        if key in names:
            return _model(names[key])
    base, words = split_name(name)
    for key in _spellings(base) if words else ():
        if key in names:
            return as_named(_model(names[key]), name, source, field)
    raise _unknown("model", name, list_models(), names, source, field)


def lookup_gpu(name: str, source: str = "catalogue", field: str = "gpu") -> GpuSpec:
    """The GPU of a name or alias. InputError (at `source`, `field`) with the nearest names."""
    names = _names(_GPUS)
    key = _plain(name).removeprefix("nvidia-")
    if key in names:
        return _gpu(names[key])
    raise _unknown("GPU", name, list_gpus(), names, source, field)


def gpu_of_device(device: str) -> GpuSpec | None:
    """The GPU that a driver calls so ("NVIDIA H100 80GB HBM3"), if the catalogue has it.

    Only words that every part of that kind has are dropped from the end: an "H100 NVL" or an
    "RTX 3090 Ti" is another chip than the catalogue's.
    """
    names, words = _names(_GPUS), device_words(device)
    while words:
        found = names.get(_plain(" ".join(words)))
        if found is not None:
            return _gpu(found)
        if not _OF_ALL.fullmatch(words.pop()):
            break
    return None


def device_words(device: str) -> list[str]:
    """A driver's name of a device without its maker's."""
    return [word for word in device.split() if word.lower() not in _MAKERS]


def list_models() -> list[str]:
    """Names of all models, in the order of the catalogue."""
    return list(_tables(_MODELS))


def list_gpus() -> list[str]:
    """Names of all GPUs, in the order of the catalogue."""
    return list(_tables(_GPUS))


def model_from_file(path: Path, name: str = "", assume: str = "") -> ModelSpec:
    """The model that a `config.json` (or a folder with one) describes. InputError as found.

    `assume` reads a model type that emu does not know as a plain one. A `hf_quant_config.json` in
    the same folder says how the weights are stored.
    """
    file = path / "config.json" if path.is_dir() else path
    label = name or file.parent.name or file.stem
    beside = file.parent / "hf_quant_config.json"
    companion = _decoded(beside) if beside.is_file() and file.name == "config.json" else None
    return from_hf_config(_decoded(file), label, str(file), assume=assume, companion=companion)


def _decoded(file: Path) -> dict[str, object]:
    """A JSON object from a file; NaN and Infinity, which some configurations hold, are allowed."""
    import json  # msgspec refuses NaN

    try:
        found = json.loads(read_input(file))
    except (ValueError, RecursionError) as error:
        raise InputError(str(file), None, "", str(error)) from None
    if not isinstance(found, dict):
        raise InputError(str(file), None, "$", "expected an object with the keys of config.json")
    return found


def _plain(name: str) -> str:
    return name.strip().lower().replace("_", "-").replace(" ", "-")


def _spellings(name: str) -> list[str]:
    """What to look for, most exact first."""
    plain = _plain(name)
    found = [name.strip().lower(), plain, plain.rsplit("/", 1)[-1]]
    short = found[-1]
    while True:
        cut = next((short.removesuffix(end) for end in SUFFIXES if short.endswith(end)), short)
        if cut == short:
            return found
        found.append(cut)
        short = cut


@functools.cache
def _tables(file: str) -> Mapping[str, str]:
    """Name -> text of its table."""
    _, *tables = f"\n{(_HERE / file).read_text('utf-8')}".split('\n["')
    return MappingProxyType(dict(table.split('"]\n', 1) for table in tables))


@functools.cache
def _names(file: str) -> Mapping[str, str]:
    """Plain spelling -> catalogue name; names go before aliases and shortened forms."""
    names: dict[str, str] = {}
    tables = _tables(file)
    for name in tables:
        names[_plain(name)] = name
        names[_plain(name).rsplit("/", 1)[-1]] = name
    for name, text in tables.items():
        for alias in _aliases(text):
            # As written first: BlitzScale's qwen_72b is not the model called Qwen-72B.
            names.setdefault(alias.lower(), name)
            names.setdefault(_plain(alias), name)
    for name in tables:
        names.setdefault(_spellings(name)[-1], name)
    return MappingProxyType(names)


def _aliases(table: str) -> list[str]:
    _, found, rest = f"\n{table}".partition("\naliases = ")
    return msgspec.json.decode(rest.split("\n", 1)[0], type=prepared(list[str])) if found else []


@functools.cache
def _model(name: str) -> ModelSpec:
    return from_hf_config(tomllib.loads(_tables(_MODELS)[name]), name, "catalogue")


@functools.cache
def _gpu(name: str) -> GpuSpec:
    entry = tomllib.loads(_tables(_GPUS)[name])
    entry.pop("aliases", None)
    return msgspec.convert({"name": name, **entry}, prepared(GpuSpec))


def _unknown(
    what: str, name: str, known: list[str], names: Mapping[str, str], source: str, field: str
) -> InputError:
    import difflib  # only a mistake needs it

    near = difflib.get_close_matches(_plain(name).rsplit("/", 1)[-1], list(names), n=5, cutoff=0.5)
    suggested = list(dict.fromkeys(names[key] for key in near))[:3]
    if suggested:
        hint = f"did you mean {' or '.join(repr(entry) for entry in suggested)}?"
    else:
        hint = f"the catalogue has {len(known)} (`emu {what.lower()}s` lists them)"
    return InputError(source, None, field, f"unknown {what} {name!r}; {hint}")
