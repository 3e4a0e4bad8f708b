"""What kernels of latent attention reach in decodes, by architecture and engine."""

from __future__ import annotations

from typing import Final, NamedTuple

from emu.catalogue.gpu import GpuSpec


class LatentDecodes(NamedTuple):
    """Decodes of latent attention on an architecture."""

    compute: float
    """Part of the peak in half precision, KV in 16 bits."""
    memory: float
    """Part of the memory's rate."""
    sequence_us: float
    """Of one processor, for each sequence."""
    row_us: float
    """The same for each query head of a sequence."""
    narrow_compute: float = 0.0
    """Part of the peak in 8 bits, KV in 8 bits; 0 = it is widened and multiplied in 16."""
    narrow_memory: float = 0.0
    """Part of the memory's rate, KV in 8 bits; 0 = as in 16 bits."""
    tile_rows: int = 1
    """So many query heads of a sequence are computed at least."""
    sequence_tokens: float = 0.0
    """Tokens of context that a sequence is worth besides its own, in arithmetic."""
    part_tokens: float = 0.0
    """The same for each share of the batch that processors are dealt; 0 = none are dealt."""
    batch_head_us: float = 0.0
    """For each query head, whatever the batch: adding up what processors have computed apart."""
    softness: float = 0.0
    """Exponent of the mean of reading and arithmetic; 0 = the longer of both."""


LATENT_DECODES: Final = {
    # FlashMLA, which publishes 660 TFLOP/s and 3,000 GB/s on an H800. Its scheduler
    # (`get_mla_metadata.cu`) deals blocks of 64 tokens to shares of the processors, and counts
    # five blocks more for each sequence and for each share; half a block is what rounding up takes.
    # Published times were in view only when the softness was chosen, of 7.5 (FlashAttention 3's)
    # and 15: flash-attention's pull request 1770 (128 heads, 128 sequences, H100) is -5 to -1 %
    # off, FlashMLA's test on an H100 with 16, 32 and 64 heads (issue 19) +2 %, tilelang's issue
    # 1859 +6 % (7.5: -4 to +3, +2, +6 %).
    "hopper": LatentDecodes(
        660 / 989.4,
        3000 / 3352,
        0.0,
        0.0,
        tile_rows=64,
        sequence_tokens=352.0,
        part_tokens=352.0,
        softness=15.0,
    ),
    # FlashAttention 3 as SGLang 0.5.14 calls it, KV in 16 bits (aiconfigurator-core 0.12.0,
    # generation_mla): H100 and H200 with 16, 64 and 128 heads and 512 tokens or more, 837 points,
    # median 4 %, p90 15 %; with 8 and 32 heads, which were left out, 4 and 10 %.
    "hopper flash_attention": LatentDecodes(
        0.612,
        0.910,
        0.0,
        0.0,
        tile_rows=64,
        sequence_tokens=278.0,
        batch_head_us=3.39 / 64,
        softness=7.5,
    ),
    # TensorRT-LLM's generated kernels as SGLang calls them on B200 and GB200: 16 and 128 heads,
    # 512 sequences of 2 and 8,192 tokens (aiconfigurator-core 0.12.0, generation_mla). With two
    # tokens it is the queries and outputs that count.
    "blackwell": LatentDecodes(0.53, 0.75, 4.4, 0.089, 0.489, 0.87),
}


def known_latent(gpu: GpuSpec, kernel: str) -> LatentDecodes | None:
    """Those of an engine's own kernel on a GPU, or of its architecture's; None = not known."""
    named = LATENT_DECODES.get(f"{gpu.architecture} {kernel}")
    return named or LATENT_DECODES.get(gpu.architecture)
