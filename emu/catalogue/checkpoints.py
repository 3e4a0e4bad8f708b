"""What a checkpoint's name says of its weights: `Qwen3-32B-FP8`, `...-AWQ`, `....w8a8`.

Owns the suffixes that quantized checkpoints are published under, and what each stores. A suffix
that names a precision but no scheme that emu can price is refused by name, with what to write
instead: read as the model without it, weights would have the wrong size.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from emu.catalogue.model import ModelSpec
from emu.errors import InputError


class Stored(msgspec.Struct, frozen=True):
    """Types of the weights and of the KV cache; an empty one = as the activations."""

    weights: str
    kv_cache: str = ""


_STORED: Final = {
    "fp8": Stored("fp8_block"),
    "fp8-block": Stored("fp8_block"),
    "fp8-dynamic": Stored("fp8"),
    "fp8-static": Stored("fp8"),
    "fp8-kv": Stored("fp8", "fp8"),
    "nvfp4": Stored("nvfp4"),
    "fp4": Stored("nvfp4"),
    "nvfp4a16": Stored("nvfp4_wo"),
    "mxfp4": Stored("mxfp4"),
    "awq": Stored("int4"),
    "awq-int4": Stored("int4"),
    "awq-4bit": Stored("int4"),
    "gptq-int4": Stored("int4"),
    "gptq-4bit": Stored("int4"),
    "w4a16": Stored("int4"),
    "quantized-w4a16": Stored("int4"),
    "gptq-int8": Stored("int8_wo"),
    "w8a16": Stored("int8_wo"),
    "quantized-w8a16": Stored("int8_wo"),
    "w8a8": Stored("int8"),
    "int8-w8a8": Stored("int8"),
    "quantized-w8a8": Stored("int8"),
    "bf16": Stored("bfloat16"),
    "fp16": Stored("float16"),
}
_WIDE: Final = ("bf16", "fp16")
_PER_CHANNEL: Final = ("redhatai", "neuralmagic", "nvidia", "amd")
"""Owners whose `-FP8` has a scale for each tensor or channel; that of others: for a block."""
_NARROW_KV: Final = ("nvidia",)
"""Owners whose checkpoints of 8 and 4 bits ask for keys and values of 8 bits, which engines take by
themselves: those of Llama, and eight of ten configurations at hand (not DeepSeek-V4)."""
_PARTLY_WIDE: Final = ("meta-llama",)
"""Owners whose `-FP8` keeps attention, and some layers, wide."""
_WORD: Final = (
    r"(?:(?:nv|mx)?fp\d+(?:a\d+)?|bf16|int\d+|w\d+a\d+\w*|awq|gptq|gguf|mlx|bnb|hqq|exl\d|autoround"
    r"|\d-?bit)"
)
_SUFFIX: Final = re.compile(
    rf"[-.](?P<words>(?:quantized[-.])?{_WORD}(?:[-.](?:{_WORD}|dynamic|static|block|kv))*)$"
)


def split_name(name: str) -> tuple[str, str]:
    """A name without what it says of its weights, and that: `Qwen/Qwen3-32B`, `fp8`.

    The second is empty where the name says nothing.
    """
    plain = name.strip()
    found = _SUFFIX.search(plain.lower().replace("_", "-"))
    if found is None:
        return plain, ""
    return plain[: found.start()], found["words"].replace(".", "-")


def as_named(spec: ModelSpec, name: str, source: str, field: str) -> ModelSpec:
    """The model of the catalogue with the weights that a checkpoint's name says.

    Raises InputError for a scheme that is not known, or that says too little of this model.
    """
    name = name.strip()
    _, words = split_name(name)
    owner = name.lower().partition("/")[0]
    stored = _STORED.get(words)
    give = "give its config.json as model.hf_config"
    if stored is None:
        problem = (
            f"{name!r}: emu does not know how -{words} stores weights; {give}, or name "
            f"{spec.name!r} and set model.dtype"
        )
        raise InputError(source, None, field, problem)
    if words == "fp8" and owner in _PER_CHANNEL:
        stored = Stored("fp8")
    spec = msgspec.structs.replace(spec, name=name)
    if stored.weights in ("bfloat16", "float16"):
        return msgspec.structs.replace(
            spec, dtype=stored.weights, linear_dtype="", expert_dtype="", unquantized=()
        )
    published = spec.linear_dtype or spec.expert_dtype
    if published and is_alike(published, stored.weights):
        return spec
    if published or spec.special_layers or (words == "fp8" and owner in _PARTLY_WIDE):
        problem = f"{name!r} does not say which of its matrices are stored so; {give}"
        raise InputError(source, None, field, problem)
    return msgspec.structs.replace(
        spec,
        linear_dtype=stored.weights,
        expert_dtype=stored.weights if spec.experts is not None else "",
        published_kv_dtype="fp8" if owner in _NARROW_KV else stored.kv_cache,
    )


def check_dtype(spec: ModelSpec, dtype: str, source: str, field: str = "model.dtype") -> None:
    """Raises InputError where a configured type of weights contradicts the checkpoint's name.

    Or where nothing is configured, and the name has narrow weights that its config.json lacks.
    """
    base, words = split_name(spec.name)
    if not words:
        return
    if dtype == "auto" and words not in _WIDE and not (spec.linear_dtype or spec.expert_dtype):
        problem = f"the name {spec.name!r} says -{words}, and its config.json nothing of it "
        problem += "(hf_quant_config.json belongs beside it); set model.dtype"
        raise InputError(source, None, "model.hf_config", problem)
    if dtype == "auto" or words not in _STORED:
        return
    says = spec.linear_dtype or _STORED[words].weights
    if not is_alike(says, dtype):
        problem = f"{dtype} contradicts the name {spec.name!r}, whose weights are {says}; "
        problem += f"leave it out, or name {base!r}"
        raise InputError(source, None, field, problem)


def weights_under(spec: ModelSpec, engine_dtype: str) -> str:
    """`model.dtype` of a server that was started with `--dtype`: that of the activations alone
    where the checkpoint stores its weights narrower."""
    return "auto" if spec.linear_dtype or spec.expert_dtype else engine_dtype


def is_alike(one: str, other: str) -> bool:
    """The same type, whatever its values share a scale with."""
    return one.removesuffix("_block") == other.removesuffix("_block")
