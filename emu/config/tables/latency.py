"""`[latency]`: what an iteration costs. `backend` chooses the kind, `tag` is its name."""

from typing import ClassVar, Literal

from msgspec import field

from emu.config.tables import (
    OWN,
    Count,
    Fraction,
    NonNegative,
    Only,
    OnlyThen,
    Positive,
    Table,
    doc,
    tag_of,
)
from emu.documents import Document
from emu.process.annotated import Annotated

Bundles = Annotated[str, doc("Root of the bundles, or one bundle.")]
Hardware = Annotated[str, doc("Name of the hardware folder; empty = the GPU's.")]
ComputeEfficiency = Annotated[Fraction, doc("Part of peak FLOP/s; 0 = default.")]
MemoryEfficiency = Annotated[Fraction, doc("Part of peak bandwidth; 0 = default.")]
Sampling = Annotated[
    Literal["auto", "greedy", "random", "top_p"],
    doc(
        "How tokens are chosen; auto = as the model's published generation config says (emu/catalogue/sampling.toml)."
    ),
]
Penalties = Annotated[
    Literal["auto", "on", "off"],
    doc("Penalties on repeated tokens; auto = with the generation config's sampling."),
]
StepOverhead = Annotated[
    float,
    doc("All that an iteration adds to its kernels, in us, instead of the engine's; -1 = default."),
]
RoundTokens = Annotated[Count, doc("Token counts are rounded up to a multiple of this.")]


class LatencyTable(Table, kw_only=True, frozen=True, tag_field="backend"):
    """What an iteration costs."""

    only: ClassVar[OnlyThen] = {"prompt_token_us": Only("front_end", (True,))}
    host_overhead: Annotated[
        bool,
        doc(
            "Model the engine around the kernels; false = engine none: no host, graphs, front end or asynchronous scheduling; profile: eager kernels, merged prompts."
        ),
    ] = True
    front_end: Annotated[
        bool,
        doc(
            "Times are a client's, through HTTP, tokenizer, detokenizer and streaming (policy vllm, with an engine); false: the engine's."
        ),
    ] = True
    prompt_token_us: Annotated[
        float,
        doc(
            "Encoding a token of a prompt, us; -1 = the engine's, for natural language. Texts of random tokens, as load generators send them, take 8 (docs/fidelity.md)."
        ),
    ] = -1.0
    jitter: Annotated[
        bool,
        doc(
            "Steps vary as those of real engines do (a spread, and a pause now and then; mean unchanged): tails mean something."
        ),
    ] = False
    attention_offload: Annotated[
        bool, doc("Decode attention runs in the host memory of the machine (nodes.pim).")
    ] = False
    sub_batch_interleaving: Annotated[
        bool, doc("attention_offload: halves of a batch, one on the GPU while one attends.")
    ] = False

    @property
    def backend(self) -> str:
        """The name of its kind."""
        return tag_of(type(self))

    @property
    def step_overhead_us(self) -> float:
        """What an iteration adds to its kernels; -1 = the engine's."""
        return -1.0

    @property
    def expert_routing(self) -> str:
        """The MoE gate."""
        return "balanced"

    @property
    def expert_routing_own(self) -> Document:
        """Keys of a gate of the user's own."""
        return {}


class GatedTable(LatencyTable, kw_only=True, frozen=True):
    """Back ends of kernels, which ask a gate which experts a batch visits."""

    step_overhead_us: StepOverhead = -1.0
    expert_routing: Annotated[
        str,
        doc(
            "MoE gate: balanced (no rank is favored), round_robin, random, skewed, or package.module:Class."
        ),
    ] = "balanced"
    expert_routing_own: Annotated[Document, doc(OWN)] = field(default_factory=dict)


class RooflineTable(GatedTable, kw_only=True, frozen=True, tag="roofline"):
    """Any model on any GPU, from the figures of both."""

    sampling: Sampling = "auto"
    penalties: Penalties = "auto"
    warm_up: Annotated[
        bool,
        doc(
            "The server has served before; false: it is fresh, its first iterations take longer, and experts' kernels are compiled when a step first has so many tokens (vLLM, SGLang; docs/lab/roofline.md)."
        ),
    ] = True
    compute_efficiency: ComputeEfficiency = 0.0
    memory_efficiency: MemoryEfficiency = 0.0
    round_tokens_to: RoundTokens = 1
    enforce_eager: Annotated[
        bool,
        doc(
            "No compilation and no CUDA graphs: the host calls every kernel of every step (vLLM's --enforce-eager; docs/lab/roofline.md)."
        ),
    ] = False
    mxfp4_experts: Annotated[
        Literal["native", "marlin"],
        doc(
            "Kernel of MXFP4 experts: the engine's own for the GPU, or the one that widens 4-bit weights to 16 bits (vLLM's VLLM_MXFP4_USE_MARLIN=1)."
        ),
    ] = "native"
    nvfp4_experts: Annotated[
        Literal["native", "cutlass"],
        doc(
            "Kernel of NVFP4 experts on TensorRT-LLM: its generated ones, or CUTLASS's (moe_config.backend)."
        ),
    ] = "native"
    fp8_block_products: Annotated[
        Literal["native", "flashinfer"],
        doc(
            "Kernel of dense products of block-scaled fp8 on Blackwell: the engine's own, or TensorRT-LLM's generated one for few rows, which is slow with prompts (SGLang's fp8-gemm-backend flashinfer_trtllm)."
        ),
    ] = "native"


class ProfileTable(GatedTable, kw_only=True, frozen=True, tag="profile"):
    """Measured layer profiles."""

    path: Bundles = ""
    hardware: Hardware = ""


class VidurLayersTable(RooflineTable, kw_only=True, frozen=True, tag="vidur"):
    """Layers and all-reduces as Vidur measured them, the rest from the roofline."""

    path: Annotated[str, doc("Folder with compute/ and network/.")] = ""
    hardware: Hardware = ""


class LinearTable(LatencyTable, kw_only=True, frozen=True, tag="linear"):
    """Coefficients."""

    base_us: Annotated[NonNegative, doc("Each iteration.")] = 5000.0
    per_token_us: Annotated[NonNegative, doc("Per token of the iteration.")] = 50.0
    per_context_token_us: Annotated[NonNegative, doc("Per token processed before.")] = 1.0
    prefill_tokens_per_s: Annotated[
        NonNegative, doc("If > 0, prefill-only batches cost tokens / this.")
    ] = 0.0


class AiconfiguratorTable(LatencyTable, kw_only=True, frozen=True, tag="aiconfigurator"):
    """NVIDIA's measured kernels."""

    step_overhead_us: StepOverhead = -1.0
    sampling: Sampling = "auto"
    penalties: Penalties = "auto"
    path: Annotated[str, doc("Saved table; written there if it does not exist.")] = ""
    tables: Annotated[
        str, doc("Engine whose kernels were measured (vllm, sglang, trtllm), /VERSION.")
    ] = "vllm"


class AstraTable(GatedTable, kw_only=True, frozen=True, tag="astra-sim"):
    """ASTRA-Sim: the embedded executor, or the program itself."""

    binary: Annotated[str, doc("The program; empty = embedded executor.")] = ""
    dialect: Annotated[
        Literal["fork", "waiting", "ticks", "oneshot"], doc("How the program speaks.")
    ] = "fork"
    timeout_s: Annotated[Positive, doc("No line for so long is an error.")] = 120.0
    cache: Annotated[str, doc("SQLite file for counts.")] = ""
    replay: Annotated[str, doc("Take counts from this file only.")] = ""
    compute: Annotated[Literal["roofline", "profile"], doc("Where layer times come from.")] = (
        "roofline"
    )
    path: Bundles = ""
    hardware: Hardware = ""
    compute_efficiency: ComputeEfficiency = 0.0
    memory_efficiency: MemoryEfficiency = 0.0
    round_tokens_to: RoundTokens = 1
    faithful: Annotated[list[str], doc("Quirks to reproduce (docs/lab/astra-sim.md).")] = field(
        default_factory=list
    )


class OwnLatencyTable(GatedTable, kw_only=True, frozen=True, tag=False):
    """A class of one's own; its own keys stand in `[latency.own]`."""

    backend: Annotated[str, doc("package.module:Class")]
    own: Annotated[Document, doc(OWN)] = field(default_factory=dict)


BACKENDS = (
    RooflineTable,
    ProfileTable,
    LinearTable,
    AstraTable,
    AiconfiguratorTable,
    VidurLayersTable,
)
"""All kinds; the first is the default."""
