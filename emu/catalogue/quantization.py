"""How a published checkpoint stores its weights: the `quantization_config` of a `config.json`.

Owns the schemes that emu can size and the rule of which parts of a layer stay wide. A scheme that
is not known is refused by name: guessing bytes for it would size the KV cache wrongly. An
optional `hf_quant_config.json` beside the `config.json` (ModelOptConfig) says the same with other
keys.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from emu.catalogue.reader import ConfigReader, HfConfig

# Names of modules that stand for each part of a layer; a pattern that matches one of them keeps
# the part wide. {0} is the layer's index.
_PART_MODULES: Final[Mapping[str, tuple[str, ...]]] = {
    "mixer": ("self_attn.q_proj", "self_attn.q_a_proj", "self_attn.o_proj", "mixer.in_proj",
              "linear_attn.in_proj_qkv", "attn.c_attn"),
    "output": ("self_attn.o_proj",),
    "mlp": ("mlp.gate_proj", "mlp.up_proj", "mixer.up_proj", "mlp.down_proj", "feed_forward.w1"),
    "shared": ("mlp.shared_experts.gate_proj", "mlp.shared_expert.gate_proj",
               "mixer.shared_experts.up_proj"),
    "experts": ("mlp.experts.0.gate_proj", "mixer.experts.0.up_proj",
                "block_sparse_moe.experts.0.w1", "mlp.experts", "mlp.experts.0.down_proj"),
}  # fmt: skip
_PREFIXES: Final = ("model.layers.{0}.", "model.language_model.layers.{0}.",
                    "language_model.model.layers.{0}.", "backbone.layers.{0}.")  # fmt: skip


class Quantization(msgspec.Struct, frozen=True):
    """What a checkpoint stores its matrices as; empty types = as its activations."""

    linear_dtype: str = ""
    expert_dtype: str = ""
    unquantized: tuple[frozenset[str], ...] = ()
    """For each layer the parts that stay wide; empty = none."""
    kv_cache_dtype: str = ""


def read_quantization(
    read: ConfigReader, layers: int, companion: HfConfig | None = None
) -> Quantization:
    """The scheme of a configuration. InputError: a method or format that emu cannot size."""
    table = read.get("quantization_config")
    if table is None and companion is not None:
        table = companion.get("quantization")
        if isinstance(table, Mapping):
            table = {"quant_method": "modelopt", **table}
    if not isinstance(table, Mapping):
        return Quantization()
    method = str(table.get("quant_method", ""))
    if not method and "quant_algo" in table:
        method = "modelopt"
    stored = _stored_as(read, table, method)
    patterns = _patterns(table)
    kept = _kept_wide(patterns, layers)
    if method == "mxfp4" and not patterns:  # gpt-oss: nothing but the experts is stored so
        kept = (frozenset(("mixer", "output", "mlp", "shared")),) * layers
    return Quantization(
        linear_dtype=stored,
        expert_dtype=stored,
        unquantized=kept if any(kept) else (),
        kv_cache_dtype=_kv_cache_dtype(table),
    )


def _stored_as(read: ConfigReader, table: HfConfig, method: str) -> str:
    key = "quantization_config.quant_method"
    if method in ("fp8", "fbgemm_fp8"):
        return "fp8_block" if table.get("weight_block_size") else "fp8"
    if method == "mxfp4":
        return "mxfp4"
    if method in ("awq", "gptq"):
        bits, group = table.get("bits", table.get("w_bit", 4)), table.get("group_size", 128)
        if bits == 8:
            return "int8_wo"
        if bits == 4:
            return "int4_g32" if group == 32 else "int4"
        raise read.problem("quantization_config.bits", f"{method} with {bits} bits is not known")
    if method == "bitsandbytes":
        return "int8" if table.get("load_in_8bit") else "int4"
    if method in ("compressed-tensors", "compressed_tensors"):
        return _of_groups(read, table)
    if method == "modelopt":
        return _of_modelopt(read, table)
    raise read.problem(key, f"unknown quantization {method!r}")


_WEIGHT_ONLY: Final = {"int8": "int8_wo", "nvfp4": "nvfp4_wo"}
"""Types whose activations a checkpoint may leave wide: then products have 16 bits."""


def _of_groups(read: ConfigReader, table: HfConfig) -> str:
    """compressed-tensors: one group of matrices; several of unlike types are refused."""
    groups = table.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise read.problem("quantization_config.config_groups", "the key is missing")
    found = set()
    for name, group in groups.items():
        weights = group.get("weights") or {}
        key = f"quantization_config.config_groups.{name}.weights"
        stored = _of_weights(read, key, weights)
        is_narrow = bool(group.get("input_activations"))
        found.add(stored if is_narrow else _WEIGHT_ONLY.get(stored, stored))
    if len(found) != 1:
        raise read.problem(
            "quantization_config.config_groups",
            f"groups of unlike types: {', '.join(sorted(found))}",
        )
    return found.pop()


def _of_weights(read: ConfigReader, key: str, weights: HfConfig) -> str:
    bits, kind, group = weights.get("num_bits"), weights.get("type"), weights.get("group_size")
    if kind == "float" and bits == 8:
        return "fp8_block" if weights.get("strategy") == "block" else "fp8"
    if kind == "float" and bits == 4:
        return "mxfp4" if group == 32 else "nvfp4"
    if kind == "int" and bits == 8:
        return "int8"
    if kind == "int" and bits == 4:
        return "int4_g32" if group == 32 else "int4"
    raise read.problem(key, f"unknown type: {bits} bits, {kind!r}")


def _of_modelopt(read: ConfigReader, table: HfConfig) -> str:
    algorithm = str(table.get("quant_algo", "")).upper()
    known = {
        "FP8": "fp8",
        "FP8_PB_WO": "fp8_block",
        "NVFP4": "nvfp4",
        "W4A16_NVFP4": "nvfp4_wo",
        "MXFP4": "mxfp4",
        "W4A16_AWQ": "int4",
        "INT4_AWQ": "int4",
    }
    if algorithm in known:
        return known[algorithm]
    raise read.problem("quantization_config.quant_algo", f"unknown algorithm {algorithm!r}")


def _kv_cache_dtype(table: HfConfig) -> str:
    if str(table.get("kv_cache_quant_algo", "")).upper() == "FP8":
        return "fp8"
    scheme = table.get("kv_cache_scheme")
    if isinstance(scheme, Mapping) and scheme.get("num_bits") == 8:
        return "fp8"
    return ""


def _patterns(table: HfConfig) -> list[str]:
    for key in ("ignore", "modules_to_not_convert", "exclude_modules", "ignored_layers"):
        listed = table.get(key)
        if isinstance(listed, list):
            return [str(entry) for entry in listed]
    return []


def _kept_wide(patterns: Sequence[str], layers: int) -> tuple[frozenset[str], ...]:
    """The parts of each layer that a list of exceptions names."""
    if not patterns:
        return ()
    tests = [_matcher(pattern) for pattern in patterns]
    kept = []
    for index in range(layers):
        parts = {
            part
            for part, modules in _PART_MODULES.items()
            if any(
                test(prefix.format(index) + module)
                for test in tests
                for prefix in _PREFIXES
                for module in modules
            )
        }
        kept.append(frozenset(parts))
    return tuple(kept)


def _matcher(pattern: str) -> Callable[[str], bool]:
    """A test of module names: `re:` expressions, globs, else a module or what lies below it."""
    if pattern.startswith("re:"):
        expression = re.compile(pattern.removeprefix("re:"))
        return lambda name: expression.match(name) is not None
    if "*" in pattern:
        glob = re.compile(fnmatch.translate(pattern))
        below = re.compile(fnmatch.translate(f"{pattern}.*"))
        return lambda name: glob.match(name) is not None or below.match(name) is not None
    return lambda name: name == pattern or name.startswith(f"{pattern}.")
