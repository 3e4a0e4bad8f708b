"""Published throughput of wide expert parallelism beside emu's, by the keys that say how it ran.

    python -m benchmarks.wide_ep

Each row is the steady step of one rank of a group: tokens of its batch over the time of the step,
for a machine or a GPU as the source counts. No constant of emu is fitted to these rows. What a
source leaves open is said in `assumed`; a row whose figure is no capacity is `is_bound`: emu has
to be above it. Docs: docs/lab/architectures.md.
"""

from __future__ import annotations

import sys
from typing import Final

import msgspec

from emu.catalogue.lookup import lookup_gpu, lookup_model
from emu.cluster.backends import make_latency
from emu.config.schema import NetworkTable, NodeTable, RooflineTable
from emu.config.tables.experts import ExpertKeys
from emu.engines.registry import find_engine
from emu.latency.base import BatchShape, LatencyBackend
from emu.latency.context import LatencyContext
from emu.latency.experts.popularity import Popularity
from emu.latency.experts.setting import ExpertSetting

EVEN: Final = Popularity(kind="uniform")
MEASURED: Final = Popularity(kind="lognormal", width=1.0)
MODEL: Final = "deepseek-ai/DeepSeek-V3"


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """What a group stands on."""

    gpu: str = "H100"
    machine: int = 8
    """GPUs that NVLink joins, for counting machines."""
    model: str = MODEL
    kv_cache_dtype: str = "auto"
    engine: tuple[str, str] = ("sglang", "0.5.3")
    captured: int = 512
    """Sequences of the largest graph that is captured, and that run at a time."""


HOPPER: Final = Site()


def context(
    role: str, ranks: int, setting: ExpertSetting | None, site: Site = HOPPER
) -> LatencyContext:
    """A replica of one GPU in a group of `ranks`, with 400 Gbit/s of network for each."""
    engine = find_engine(*site.engine)
    return LatencyContext(
        table=RooflineTable(),
        engine=msgspec.structs.replace(engine.model, graph_tokens_max=site.captured),
        kernels=engine.kernels(engine.model),
        network=NetworkTable(),
        model=lookup_model(site.model),
        gpu=lookup_gpu(site.gpu),
        node=NodeTable(gpu=site.gpu, gpus=site.machine, nic_gbps=400.0),
        tensor_parallel=1,
        pipeline_parallel=1,
        expert_parallel=ranks,
        dtype="auto",
        kv_cache_dtype=site.kv_cache_dtype,
        gpus_per_machine=site.machine,
        seed=42,
        hands_off=role == "prefill",
        decodes_only=role == "decode",
        shared_experts=setting,
        max_num_seqs=site.captured,
        max_num_batched_tokens=16_384,
    )


LIKENESS: Final = ExpertKeys().eplb_likeness
RECORDED: Final = 0.95
"""Of a group on GB200 with SGLang's launch scripts and its way of recording loads, by its traces
(sgl-project/sglang issue 10903; shifangx/Scripts-SGLang at 481e976)."""
RENEWED: Final = 0.995
"""Of a plan made of the load that it serves (TensorRT-LLM tech blog 4); DeepSeek makes a new one
every ten minutes from what its servers saw (DeepSeek-V3's report, 3.4)."""


def deepep(
    overlap: str = "none",
    popularity: Popularity | None = EVEN,
    redundant: int = 0,
    likeness: float = LIKENESS,
    *,
    is_global: bool = True,
) -> ExpertSetting:
    """DeepEP with SGLang's rules of overlap.

    Its commands say `--eplb-algorithm deepseek`, which deals all slots at once.
    """
    return ExpertSetting(
        all2all="deepep",
        overlap=overlap,
        popularity=popularity,
        redundant=redundant,
        is_global=is_global,
        likeness=likeness,
    )


def backend(
    role: str, ranks: int, setting: ExpertSetting | None, site: Site = HOPPER
) -> LatencyBackend:
    """Its cost."""
    return make_latency(context(role, ranks, setting, site))


def prompts(count: int, tokens: int) -> BatchShape:
    """Whole prompts."""
    return BatchShape(prefill_new=[tokens] * count, prefill_context=[0] * count, sequences=count)


def decodes(count: int, tokens: int) -> BatchShape:
    """Sequences of so many tokens."""
    return BatchShape(
        decode_count=count,
        decode_context_sum=count * tokens,
        decode_context_max=tokens,
        decode_context_min=tokens,
        sequences=count,
    )


def gpu_rate(made: LatencyBackend, shape: BatchShape) -> float:
    """Tokens a second of a rank that runs this batch."""
    return 1e9 * shape.new_tokens / made.iteration_ns(shape)


def node_rate(made: LatencyBackend, shape: BatchShape) -> float:
    """Tokens a second of a machine of eight ranks that all run this batch."""
    return 8 * gpu_rate(made, shape)


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """A published figure, and how it was taken."""

    what: str
    role: str
    ranks: int
    setting: ExpertSetting
    shape: BatchShape
    published: float
    """Tokens/s: of a machine of eight GPUs, or of one GPU (`of_gpu`)."""
    of_gpu: bool = False
    site: Site = HOPPER
    assumed: str = ""
    """What the source leaves open."""
    is_bound: bool = False
    """A mean over a day of load: no capacity."""

    def rate(self) -> float:
        """What emu finds."""
        made = backend(self.role, self.ranks, self.setting, self.site)
        return (gpu_rate if self.of_gpu else node_rate)(made, self.shape)


TWO: Final = "two_batch"
_PLACED: Final = (MEASURED, 32)
H800: Final = Site(gpu="H800")
H200: Final = Site(gpu="H200", engine=("vllm", "0.11"))
# SGLang ran DeepEP on GB200, over NVLink alone: a rack is one machine.
# Their decode servers run the batches that their launch scripts say, from graphs of that size. What
# they call attention in 16 or 8 bits is its KV; its products are those of the checkpoint.
GB200: Final = Site(gpu="GB200", machine=72, captured=768)
GB200_FP4: Final = Site(
    gpu="GB200",
    machine=72,
    model="nvidia/DeepSeek-R1-0528-NVFP4",
    kv_cache_dtype="fp8",
    captured=1408,
)
_RECORDED: Final = (MEASURED, 32, RECORDED)


def _prefill(tokens: int, published: float) -> Deployment:
    return Deployment(
        what=f"SGLang, 32 H100, prefill, prompts of {tokens:,}",
        role="prefill",
        ranks=32,
        setting=deepep(TWO, *_PLACED),
        shape=prompts(16_384 // tokens, tokens),
        published=published,
    )


DEPLOYMENTS: Final = (
    Deployment(
        what="DeepSeek's profile, prefill, EP 32, prompts of 4,096, even experts",
        role="prefill",
        ranks=32,
        setting=deepep(TWO),
        shape=prompts(4, 4096),
        published=62_713,
        site=H800,
    ),
    Deployment(
        what="DeepSeek's profile, decode, EP 128, 128 sequences a GPU, even experts",
        role="decode",
        ranks=128,
        setting=deepep(TWO),
        shape=decodes(128, 4096),
        published=18_598,
        site=H800,
    ),
    Deployment(
        what="DeepSeek's day, decode, EP 144, contexts of 4,989",
        role="decode",
        ranks=144,
        setting=deepep(TWO, *_PLACED, RENEWED, is_global=False),
        shape=decodes(88, 4989),
        published=14_800,
        site=H800,
        assumed="88 sequences a GPU: 14,800 over 8 GPUs at 21 tokens/s of a user",
    ),
    Deployment(
        what="DeepSeek's day, prefill without cache hits, EP 32",
        role="prefill",
        ranks=32,
        setting=deepep(TWO, *_PLACED, RENEWED, is_global=False),
        shape=prompts(4, 4096),
        published=32_206,
        site=H800,
        is_bound=True,
    ),
    Deployment(
        what="SGLang, 32 H100, prefill, prompts of 4,096, even experts",
        role="prefill",
        ranks=32,
        setting=deepep(TWO),
        shape=prompts(4, 4096),
        published=59_337,
    ),
    _prefill(4096, 50_302),
    _prefill(2048, 54_543),
    _prefill(1024, 57_674),
    Deployment(
        what="SGLang, 72 H100, decode, 256 sequences a GPU, two batches",
        role="decode",
        ranks=72,
        setting=deepep(TWO, *_PLACED),
        shape=decodes(256, 2050),
        published=22_282,
    ),
    Deployment(
        what="the same, one batch",
        role="decode",
        ranks=72,
        setting=deepep("none", *_PLACED),
        shape=decodes(256, 2050),
        published=17_754,
    ),
    Deployment(
        what="vLLM, 32 H200, decode, 512 sequences a GPU, outputs of 512",
        role="decode",
        ranks=32,
        # Its launch script routes tokens evenly at random.
        setting=deepep(TWO, EVEN, 32, is_global=False),
        shape=decodes(512, 257),
        published=2_387,
        of_gpu=True,
        site=H200,
    ),
    Deployment(
        what="SGLang, 48 GB200, decode, fp8 (part 1)",
        role="decode",
        ranks=48,
        setting=deepep("none", *_RECORDED),
        shape=decodes(768, 2050),
        published=7_583,
        of_gpu=True,
        site=GB200,
        assumed="768 sequences a GPU, copies as in part 2",
    ),
    Deployment(
        what="SGLang, 48 GB200, decode, bf16 attention, fp8 experts (part 2)",
        role="decode",
        ranks=48,
        setting=deepep("single_batch", *_RECORDED),
        shape=decodes(768, 2050),
        published=9_087,
        of_gpu=True,
        site=GB200,
    ),
    Deployment(
        what="SGLang, 48 GB200, decode, fp8 attention, nvfp4 experts (part 2)",
        role="decode",
        ranks=48,
        setting=deepep("single_batch", *_RECORDED),
        shape=decodes(1408, 2050),
        published=13_386,
        of_gpu=True,
        site=GB200_FP4,
    ),
    Deployment(
        what="SGLang, 4 GB200 a group, prefill, bf16 attention, fp8 experts (part 2)",
        role="prefill",
        ranks=4,
        setting=deepep("none", MEASURED, 32),
        shape=prompts(8, 2048),
        published=18_471,
        of_gpu=True,
        site=GB200,
        assumed="16,384 tokens a step, 32 copies",
    ),
    Deployment(
        what="SGLang, 2 GB200 a group, prefill, nvfp4 experts (part 2)",
        role="prefill",
        ranks=2,
        setting=deepep("none", MEASURED, 32),
        shape=prompts(8, 2048),
        published=26_156,
        of_gpu=True,
        site=GB200_FP4,
        assumed="16,384 tokens a step, 32 copies",
    ),
)


def main() -> int:
    """Print the table."""
    print("| deployment | tokens/s of | published | emu | off | assumed |")
    print("|---|---|--:|--:|--:|---|")
    near = counted = 0
    for row in DEPLOYMENTS:
        found = row.rate()
        off = found / row.published - 1
        of = "a GPU" if row.of_gpu else "a machine"
        said = "above" if row.is_bound and off > 0 else f"{off:+.0%}"
        if not row.is_bound:
            counted += 1
            near += abs(off) <= 0.15
        print(
            f"| {row.what} | {of} | {row.published:,.0f} | {found:,.0f} | {said} | {row.assumed} |"
        )
    print(f"\n{near} of {counted} within 15 %")
    return 0


if __name__ == "__main__":
    sys.exit(main())
