"""Tables of whole iterations from NVIDIA's kernel database: what each is of, and its points."""

from __future__ import annotations

from typing import Final

import msgspec

from emu.catalogue import sizes
from emu.catalogue.model import ModelSpec
from emu.errors import InputError

WHEEL: Final = "aiconfigurator-core==0.12.0"
FORMAT: Final = "emu aiconfigurator table 2"
ENGINES: Final = ("vllm", "sglang", "trtllm")

SYSTEMS: Final = {
    "A100-SXM4-80GB": "a100_sxm",
    "A100-SXM4-40GB": "a100_sxm",
    "A100-PCIE-80GB": "a100_pcie",
    "A30": "a30",
    "H100-SXM5-80GB": "h100_sxm",
    "H100-PCIE-80GB": "h100_pcie",
    "H200-SXM-141GB": "h200_sxm",
    "B200-SXM-180GB": "b200_sxm",
    "GB200": "gb200",
    "L4": "l4",
    "L40S": "l40s",
    "RTXPRO6000": "rtx_pro_6000_server",
}
"""Our GPU -> the database's system."""


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """Where a table comes from."""

    wheel: str
    model: str
    """Name in the database."""
    system: str
    engine: str
    """Engine whose kernels were measured."""
    version: str = "current"
    """Version that was asked for: the database's slots current, previous, next, or a literal."""
    tensor_parallel: int
    expert_parallel: int = 1
    weight_dtype: str = "bfloat16"
    expert_dtype: str = ""
    """Empty without experts."""
    kv_cache_dtype: str = "bfloat16"

    def told(self) -> str:
        """What tells tables apart, in words."""
        return (
            f"{self.system}, TP {self.tensor_parallel}, EP {self.expert_parallel}, "
            f"{self.engine}/{self.version}, weights {self.weight_dtype}, "
            f"experts {self.expert_dtype or 'none'}, KV {self.kv_cache_dtype}"
        )


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What a table is asked for."""

    spec: ModelSpec
    gpu: str
    tensor_parallel: int = 1
    expert_parallel: int = 1
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    engine: str = "vllm"
    """ENGINE or ENGINE/VERSION."""
    source: str = "config"

    def provenance(self, name: str = "") -> Provenance:
        """What the table will state. Raises InputError for a type or an engine it never has."""
        engine, _, version = self.engine.partition("/")
        if engine not in ENGINES:
            problem = f"{engine!r} is none of {', '.join(ENGINES)} (or ENGINE/VERSION)"
            raise InputError(self.source, None, "latency.tables", problem)
        if self.gpu not in SYSTEMS:
            problem = f"aiconfigurator has no data for {self.gpu}; it has {', '.join(SYSTEMS)}"
            raise InputError(self.source, None, "nodes.gpu", problem)
        spec, dtype = self.spec, self.dtype
        kv_dtype = sizes.kv_dtype(spec, dtype, self.kv_cache_dtype)
        experts = sizes.expert_dtype(spec, dtype) if spec.experts is not None else ""
        linear = sizes.linear_dtype(spec, dtype)
        if "mixer" in spec.layer(spec.layers - 1).unquantized:
            linear = sizes.activation_dtype(spec, dtype)
        return Provenance(
            wheel=WHEEL,
            model=name,
            system=SYSTEMS[self.gpu],
            engine=engine,
            version=version or "current",
            tensor_parallel=self.tensor_parallel,
            expert_parallel=self.expert_parallel,
            weight_dtype=self._type(linear),
            expert_dtype=self._type(experts) if experts else "",
            kv_cache_dtype=self._type(kv_dtype),
        )

    def _type(self, dtype: str) -> str:
        """The database's word."""
        known = {
            "bfloat16": "bfloat16",
            "float16": "bfloat16",
            "fp8": "fp8",
            "fp8_block": "fp8_block",
            "nvfp4": "nvfp4",
            "int4_g32": "int4",
            "int8": "int8",
            "int4": "int4",
            "mxfp4": "w4a16_mxfp4",
        }
        if dtype not in known:
            problem = f"aiconfigurator has no tables of {dtype}"
            raise InputError(self.source, None, "model.dtype", problem)
        return known[dtype]


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """A sampled table, as it is saved."""

    format: str = FORMAT
    our_model: str = ""
    provenance: Provenance
    points: list[tuple[int, int, int, int, int]]
    """(prompt tokens, their history, decodes, history of each, ns)."""
