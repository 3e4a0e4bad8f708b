"""What a user names: words that open-ended keys accept beside an import path, files, examples.

The packages that implement the words own the behavior; these tuples only let the configuration
refuse a typing error before anything is built.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

from emu.errors import InputError


class EngineWords(NamedTuple):
    """What a configuration may say of one serving engine (`emu/engines/` models it)."""

    versions: tuple[str, ...]
    """Modeled, the oldest first."""
    policies: tuple[str, ...]
    """Values of `scheduler.policy` that are this engine's own; the first is its default."""

    @property
    def default(self) -> str:
        """The version where none is given: the newest."""
        return self.versions[-1]


ENGINES: Final[dict[str, EngineWords]] = {
    "vllm": EngineWords(versions=("0.11", "0.15", "0.19"), policies=("vllm",)),
    "sglang": EngineWords(
        versions=("0.5.3", "0.5.6", "0.5.9", "0.5.14", "0.5.23"), policies=("sglang",)
    ),
    "tensorrt-llm": EngineWords(versions=("1.0", "1.1", "1.2", "1.3"), policies=("tensorrt-llm",)),
}
"""Serving engines by name. Policies of no engine are those of simulators, and go with any."""
NO_ENGINE: Final = "none"
"""`engine.name` for kernels alone: no host, no graphs, no front end."""
EXPERT_ROUTING: Final = ("balanced", "round_robin", "random", "skewed")
DECODE_POLICIES: Final = ("auto", "first_free", "least_used")
ADMISSIONS: Final = ("",)
MIGRATIONS: Final = ("gap",)

WorkloadFormat = Literal[
    "auto",
    "jsonl",
    "azure",
    "mooncake",
    "burstgpt",
    "sharegpt",
    "csv",
    "vidur",
    "splitwise",
    "blitzscale",
    "otel",
    "litellm",
    "gateway",
    "aiperf",
    "inference-perf",
    "guidellm",
    "vllm-bench",
    "servegen",
]

IMPORT_PATH: Final = r"([A-Za-z_]\w*(\.[A-Za-z_]\w*)*|[^:\n]*\.py):[A-Za-z_]\w*"


def is_import_path(value: str) -> bool:
    """True for `package.module:Class` and `./file.py:Class`."""
    return ":" in value and re.fullmatch(IMPORT_PATH, value) is not None


def is_file_path(value: str) -> bool:
    """True for `./file.py:Class`."""
    return is_import_path(value) and value.rpartition(":")[0].endswith(".py")


def is_own_table(key: object) -> bool:
    """Whether a key holds keys of a class of the user's own, of which nothing is known here."""
    return isinstance(key, str) and (key == "own" or key.endswith("_own"))


# --------------------------------------------------------------------------------------------------
# Nearest known words: "did you mean ...?" for keys and values. Pure, deterministic.


_SHOWN_CHARS: Final = 60
_SHORT_TYPES: Final = {
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "float": "float32",
    "fp4": "nvfp4",
    "awq": "int4",
    "w8a8": "int8",
}
"""What others call types of numbers, and what a configuration does."""


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The known word that resembles `word` most, or an empty string if none does.

    `cutoff` is the least likeness, 0 to 1.
    """
    words = sorted(known)
    if _SHORT_TYPES.get(word.casefold()) in words:
        return _SHORT_TYPES[word.casefold()]
    folded = word.casefold().replace("-", "_")
    for candidate in words:
        if candidate.casefold().replace("-", "_") == folded:
            return candidate
    # The same words in another order: ttft_p95_ms means p95_ttft_ms.
    parts = sorted(folded.split("_"))
    for candidate in words:
        if sorted(candidate.casefold().replace("-", "_").split("_")) == parts:
            return candidate
    import difflib  # only after a mistake

    matches = difflib.get_close_matches(word, words, n=1, cutoff=cutoff)
    return matches[0] if matches else ""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """What is appended to a problem; nothing if no known word resembles this one."""
    near = nearest(word, known)
    return f"; did you mean {near}?" if near else ""


def unknown_key(key: str, here: Sequence[str], elsewhere: Mapping[str, str]) -> str:
    """The problem text for a key that its table does not have.

    `here` are the table's keys, `elsewhere` maps key names of other tables to their dotted path.
    A slip of one letter in the right table is likelier than the right key in the wrong table,
    and that is likelier than a vague resemblance.
    """
    near = nearest(key, here, cutoff=0.8)
    if key in elsewhere and not near:
        return f"unknown key; did you mean {elsewhere[key]}?"
    near = near or nearest(key, here)
    if near:
        return f"unknown key; did you mean {near}?"
    far = nearest(key, elsewhere, cutoff=0.8)
    if far:
        return f"unknown key; did you mean {elsewhere[far]}?"
    if not here:
        return "unknown key"
    return f"unknown key; known keys are {', '.join(here)}"


def unknown_value(value: str, known: Sequence[str], what: str = "expected one of") -> str:
    """The problem text for a word that is not among the known ones."""
    return f'{what} {", ".join(known)}; got "{value}"{did_you_mean(value, known)}'


def dotted(path: Sequence[str | int]) -> str:
    """A path as the user writes it after `--set`."""
    return ".".join(str(part) for part in path)


def shown(value: object) -> str:
    """A value as an error message quotes it: TOML-like and short."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        digits = hex(value) if abs(value) >= 10**300 else str(value)
        return digits if len(digits) <= _SHOWN_CHARS else "a huge integer"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return "an array"
    if isinstance(value, str):
        short = value if len(value) <= _SHOWN_CHARS else value[: _SHOWN_CHARS - 3] + "..."
        return quoted(short)
    return "nothing" if value is None else f"a date or time ({value})"


def quoted(word: object) -> str:
    """A word between quotes, as TOML writes it."""
    import json

    return json.dumps(word, ensure_ascii=False)


# --------------------------------------------------------------------------------------------------
# Names of serving engines: one spelling here, those of other programs where their files are read.

_SPELLINGS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "trtllm": "tensorrt-llm",
        "trt-llm": "tensorrt-llm",
        "trt": "tensorrt-llm",
        "tensorrtllm": "tensorrt-llm",
        "tensorrt_llm": "tensorrt-llm",
        "tensorrt-llm": "tensorrt-llm",
        "sgl": "sglang",
        "sglang": "sglang",
        "vllm": "vllm",
    }
)
_VERSIONED: Final = r"([A-Za-z][A-Za-z_ -]*?)?(?:[ /@:=-]*v?(\d+(?:\.\d+)*)\S*)?"


def engine_label(name: str, version: str) -> str:
    """`vllm-0.15`: an engine of one version, as lines, tables and files call it."""
    return f"{name}-{version}" if version else name


def engine_words(text: str) -> tuple[str, str]:
    """(name, version) of an engine as programs write it; either is empty if the text lacks it.

    `vllm-0.15`, `vLLM 0.15.1`, `vllm==0.15.1`, `TRTLLM`, `0.15`: versions have two numbers, or as
    many as those of the engine that are modeled.
    """
    found = re.fullmatch(_VERSIONED, text.strip())
    if found is None:
        return text.strip(), ""
    word = (found.group(1) or "").strip().lower().replace(" ", "-")
    name = _SPELLINGS.get(word, word)
    numbers = ENGINES[name].default.count(".") + 1 if name in ENGINES else 2
    return name, ".".join((found.group(2) or "").split(".")[:numbers])


def engine_problem(name: str, version: str) -> tuple[str, str] | None:
    """(key, problem) of an engine that is not modeled; None if it is, or "none"."""
    if name == NO_ENGINE:
        return ("version", "engine none has no versions") if version else None
    if name not in ENGINES:
        problem = unknown_value(name, [*ENGINES, NO_ENGINE])
        meant = _SPELLINGS.get(name.casefold(), "")
        if meant:
            problem = f"{problem.partition('; did')[0]}; did you mean {meant}?"
        return "name", problem
    if version and version not in ENGINES[name].versions:
        known = ", ".join(ENGINES[name].versions)
        return "version", f'{name} "{version}" is not modeled; modeled are {known}'
    return None


def policy_problem(engine: str, policy: str) -> str:
    """Why an engine cannot run this scheduler; empty if it can.

    Kernels alone (engine none) go with every scheduler.
    """
    owners = [name for name, words in ENGINES.items() if policy in words.policies]
    if engine == NO_ENGINE or not owners or engine in owners:
        return ""
    own = " or ".join(f'"{name}"' for name in ENGINES[engine].policies)
    return f'"{policy}" is the scheduler of engine {" and ".join(owners)}; {engine} has {own}'


def engine_moved(value: object) -> str:
    """The problem text for `latency.engine`, where an engine was named before."""
    if value == NO_ENGINE:
        now = f'name = "{NO_ENGINE}"'
    elif isinstance(value, str) and value.endswith(".toml"):
        now = f'learned = "{value}"'
    elif isinstance(value, str) and engine_problem(*engine_words(value)) is None:
        name, version = engine_words(value)
        now = f'name = "{name}", version = "{version}"'
    else:
        now = "name, version, learned"
    return f"engines have a table of their own now: [engine] {now}"


# --- files: what cannot be read is one line; examples in the package ------------------------------
EXAMPLES: Final = Path(__file__).resolve().parents[1] / "examples"
SCHEMA_DIRECTIVE: Final = "#:schema "
"""The first line of a configuration may say so which schema an editor is to check it by."""


INPUT_BYTES_MAX: Final = 1 << 32
"""What is read into memory as a whole."""
_PIECE_BYTES: Final = 1 << 16
"""Read at once of a file that does not tell its size: memory for so much is taken at each read."""


def read_input(path: Path, field: str = "") -> bytes:
    """The bytes of a file. `field`: the key or option that names it."""
    try:
        return read_file(path, INPUT_BYTES_MAX)
    except (OSError, ValueError) as error:
        problem = getattr(error, "strerror", None) or str(error)
        raise InputError(str(path), None, field, problem) from None


def read_file(path: Path, bytes_max: int) -> bytes:
    """The bytes of a regular file. Raises OSError, or ValueError for what is none or too large."""
    problem = no_file(path)
    if problem:
        raise ValueError(problem)
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(size) if 0 < size <= bytes_max else b""
        more = b"" if size > bytes_max else file.read(_PIECE_BYTES)
        while more and len(data) <= bytes_max:  # some of /proc tell no size, a log grows
            data += more
            more = file.read(_PIECE_BYTES)
    if size > bytes_max or len(data) > bytes_max:
        raise ValueError(f"is larger than {bytes_max >> 20} MiB")
    return data


def no_file(path: Path) -> str:
    """Why a path that is there is not a regular file: a device has no end, a pipe may have none.

    Empty for files, and for directories, which opening refuses. Raises OSError.
    """
    mode = path.stat().st_mode
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return ""
    is_pipe, is_socket = stat.S_ISFIFO(mode), stat.S_ISSOCK(mode)
    kind = "pipe" if is_pipe else "socket" if is_socket else "device"
    return f"is a {kind}, expected a regular file"


def json_object(path: Path, line: int | None, text: bytes) -> dict[str, Any]:
    """A JSON object that is a whole file, or a line of one."""
    import msgspec  # the parser of commands needs words alone

    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(str(path), line, "", f"not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InputError(str(path), line, "", "expected a JSON object")
    return value


def examples() -> list[str]:
    """Names of the examples."""
    return sorted(path.stem for path in EXAMPLES.glob("*.toml"))


def example_text(name: str) -> str:
    """An example as it stands in a user's own directory. Raises InputError for other names."""
    if name not in examples():
        raise InputError("init", None, "--example", unknown_value(name, examples()))
    text = (EXAMPLES / f"{name}.toml").read_text(encoding="utf-8")
    if text.startswith(SCHEMA_DIRECTIVE):
        text = text.partition("\n")[2]
    # In the repository examples lie in configs/ and write to runs/ beside it.
    text = re.sub(r'^dir = "(?:\.\./)+', 'dir = "', text, flags=re.MULTILINE)
    text = re.sub(r"(?:python -m )?emu (\w+ )?configs/[\w./-]+\.toml", r"emu \1cluster.toml", text)
    return re.sub(r"configs/(?:experiments/)?([\w-]+)\.toml", r"\1.toml", text)


# --------------------------------------------------------------------------------------------------
# Plain tables as TOML text: just what configurations need.


def toml_text(tables: dict[str, Any]) -> str:
    """Scalars first, then tables and arrays of tables, in order."""
    lines: list[str] = []
    _table(tables, "", lines)
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        import json

        return json.dumps(value)
    if isinstance(value, list):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_value(item)}" for key, item in value.items()) + "}"
    return repr(value)


def _is_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, dict) for v in value)


def _table(table: dict[str, Any], prefix: str, lines: list[str]) -> None:
    for key, value in table.items():
        if value is not None and not isinstance(value, dict) and not _is_tables(value):
            lines.append(f"{key} = {_value(value)}")
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            lines += ["", f"[{name}]"]
            _table(value, f"{name}.", lines)
        elif _is_tables(value):
            for item in value:
                lines += ["", f"[[{name}]]"]
                _table(item, f"{name}.", lines)
