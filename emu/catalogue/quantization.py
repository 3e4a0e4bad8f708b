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

from emu.catalogue.model import Quantization
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


def read_quantization(
    read: ConfigReader, layers: int, companion: HfConfig | None = None
) -> Quantization:
    """The scheme of a configuration. InputError: a method or format that emu cannot size."""
    table = read.get("quantization_config", read.get("compression_config"))  # its older name
    if table is None and companion is not None:
        table = companion.get("quantization")
        if isinstance(table, Mapping):
            table = {"quant_method": "modelopt", **table}
    if table is None:
        return Quantization()
    if not isinstance(table, Mapping):
        raise read.problem("quantization_config", f"expected a table, got {table!r}")
    method = str(table.get("quant_method", ""))
    if not method and "quant_algo" in table:
        method = "modelopt"
    _check_whole(read, table)
    stored = _stored_as(read, table, method)
    patterns = _patterns(table)
    kept = _kept_wide(read, patterns, _targets(table), layers)
    if method == "mxfp4" and not patterns:  # gpt-oss: nothing but the experts is stored so
        kept = (frozenset(("mixer", "output", "mlp", "shared")),) * layers
    return Quantization(
        linear_dtype=stored,
        expert_dtype=stored,
        unquantized=kept if any(kept) else (),
        kv_cache_dtype=_kv_cache_dtype(read, table),
    )


def _check_whole(read: ConfigReader, table: HfConfig) -> None:
    """Refuse what changes some matrices in a way that no type of emu's has."""
    key = "quantization_config"
    sparse = table.get("sparsity_config")
    if isinstance(sparse, Mapping) and sparse.get("format", "dense") != "dense":
        raise read.problem(f"{key}.sparsity_config", "sparse weights are not modeled")
    if str(table.get("quant_algo", "")).upper() == "MIXED_PRECISION":
        raise read.problem(f"{key}.quant_algo", "matrices of several types are not modeled")
    for name in _rules(table):
        if not name.startswith("-:"):
            raise read.problem(f"{key}.dynamic", f"{name!r} is stored otherwise than the rest")


def _rules(table: HfConfig) -> list[str]:
    """GPTQ's exceptions: an expression with "-:" before it leaves matrices as they were."""
    rules = table.get("dynamic")
    return [str(name) for name in rules] if isinstance(rules, Mapping) else []


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
        return _of_bitsandbytes(read, table)
    if method in ("compressed-tensors", "compressed_tensors"):
        return _of_groups(read, table)
    if method == "modelopt":
        return _of_modelopt(read, table)
    raise read.problem(key, f"unknown quantization {method!r}")


def _of_bitsandbytes(read: ConfigReader, table: HfConfig) -> str:
    if table.get("load_in_8bit"):
        return "int8"
    if table.get("load_in_4bit"):
        return "int4"
    raise read.problem("quantization_config.load_in_4bit", "neither 4 nor 8 bits")


_WEIGHT_ONLY: Final = {
    "int8": "int8_wo",
    "nvfp4": "nvfp4_wo",
    "int4": "int4",
    "int4_g32": "int4_g32",
}
"""Types whose activations a checkpoint may leave wide: then products have 16 bits."""
_BOTH: Final = ("fp8", "fp8_block", "int8", "nvfp4", "mxfp4")
"""Types whose products have narrow activations."""


def _of_groups(read: ConfigReader, table: HfConfig) -> str:
    """compressed-tensors: one group of matrices; several of unlike types are refused."""
    groups = table.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise read.problem("quantization_config.config_groups", "the key is missing")
    found = set()
    for name, group in groups.items():
        key = f"quantization_config.config_groups.{name}.weights"
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            raise read.problem(key, "expected a table")
        stored = _of_weights(read, key, weights)
        is_narrow = bool(group.get("input_activations"))
        if stored not in (_BOTH if is_narrow else _WEIGHT_ONLY):
            width = "narrow" if is_narrow else "16-bit"
            raise read.problem(key, f"{stored} with {width} activations is not modeled")
        found.add(stored if is_narrow else _WEIGHT_ONLY[stored])
    if len(found) != 1:
        raise read.problem(
            "quantization_config.config_groups",
            f"groups of unlike types: {', '.join(sorted(found))}",
        )
    return found.pop()


def _of_weights(read: ConfigReader, key: str, weights: HfConfig) -> str:
    bits, kind, group = weights.get("num_bits"), weights.get("type"), weights.get("group_size")
    if kind == "float" and bits == 8 and weights.get("strategy") != "group":  # that is MXFP8
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


def _kv_cache_dtype(read: ConfigReader, table: HfConfig) -> str:
    """Empty where keys and values stay wide. InputError: another type than 8 bits."""
    algorithm, scheme = table.get("kv_cache_quant_algo"), table.get("kv_cache_scheme")
    if algorithm:
        if str(algorithm).upper() != "FP8":
            key = "quantization_config.kv_cache_quant_algo"
            raise read.problem(key, f"a KV cache of {algorithm!r} is not modeled")
        return "fp8"
    if isinstance(scheme, Mapping) and scheme:
        if scheme.get("num_bits") != 8:
            key = "quantization_config.kv_cache_scheme"
            raise read.problem(key, f"a KV cache of {scheme.get('num_bits')!r} bits is not modeled")
        return "fp8"
    return ""


def _patterns(table: HfConfig) -> list[str]:
    found = [f"re:{rule.removeprefix('-:')}" for rule in _rules(table)]
    keys = ("ignore", "modules_to_not_convert", "exclude_modules", "ignored_layers")
    for key in (*keys, "llm_int8_skip_modules"):
        listed = table.get(key)
        if isinstance(listed, list):
            return found + [str(entry) for entry in listed]
    return found


def _targets(table: HfConfig) -> list[str]:
    """What alone is quantized, where that is not every matrix."""
    groups = table.get("config_groups")
    if not isinstance(groups, Mapping):
        return []
    listed = [group.get("targets") for group in groups.values() if isinstance(group, Mapping)]
    names = [str(name) for names in listed if isinstance(names, list) for name in names]
    return [] if _EVERY in names else names


_EVERY: Final = "Linear"
"""The class of all matrices, which a group of compressed-tensors names as its target."""


def _kept_wide(
    read: ConfigReader, patterns: Sequence[str], targets: Sequence[str], layers: int
) -> tuple[frozenset[str], ...]:
    """The parts of each layer that a list of exceptions names, or no target does."""
    if not patterns and not targets:
        return ()
    left, taken = _matcher(read, patterns), _matcher(read, targets)
    kept = []
    for index in range(layers):
        prefixes = [prefix.format(index) for prefix in _PREFIXES]
        parts = set()
        for part, modules in _PART_MODULES.items():
            names = [prefix + module for prefix in prefixes for module in modules]
            if any(map(left, names)) or (targets and not any(map(taken, names))):
                parts.add(part)
        kept.append(frozenset(parts))
    return tuple(kept)


def _matcher(read: ConfigReader, patterns: Sequence[str]) -> Callable[[str], bool]:
    """A test of module names: `re:` expressions, globs, else a module or what lies below it.

    A module may be named by the end of its path alone (`self_attn`), as AWQ and bitsandbytes do.
    Lists have hundreds of entries, so that plain ones are looked up.
    """
    plain, expressions = set(), []
    for pattern in patterns:
        if pattern.startswith("re:"):
            expressions.append(pattern.removeprefix("re:"))
        elif "*" in pattern:
            glob = fnmatch.translate(pattern)
            expressions += [glob, fnmatch.translate(f"{pattern}.*")]
        else:
            plain.add(pattern)
    try:
        compiled = re.compile("|".join(f"(?:{one})" for one in expressions))
    except re.error as error:
        raise read.problem("quantization_config", f"a wrong expression: {error}") from None
    has_any = bool(expressions)

    def is_named(name: str) -> bool:
        words = name.split(".")
        for first in range(len(words)):
            for last in range(first, len(words)):
                if ".".join(words[first : last + 1]) in plain:
                    return True
        return has_any and compiled.match(name) is not None

    return is_named
