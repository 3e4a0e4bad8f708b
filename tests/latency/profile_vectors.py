"""Helpers of the profile tests: where the shared bundles are, and a small bundle of our own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.shared_data import SHARED

SHARED_PROFILES = SHARED / "profiles"

needs_bundles = pytest.mark.skipif(
    not SHARED_PROFILES.is_dir(), reason="the measured bundles (../shared/data/profiles) are absent"
)

ARCHITECTURE = """\
sequence:
  prologue: [embedding]
  pre_attn: [layernorm, qkv_proj, attention]
  post_attn: [o_proj]
  mlp_dense: [down_proj]
  mlp_moe: []
  head: [final_layernorm, lm_head, sampler]
catalog:
  dense:
    embedding: {}
    layernorm: {tp_stable: true}
    qkv_proj: {}
    o_proj: {}
    down_proj: {}
    final_layernorm: {tp_stable: true}
  per_sequence:
    lm_head: {}
    sampler: {tp_stable: true}
  attention:
    attention: {}
"""

MOE_ARCHITECTURE = (
    ARCHITECTURE.replace("mlp_dense: [down_proj]", "mlp_dense: []").replace(
        "mlp_moe: []", "mlp_moe: [moe]"
    )
    + "  moe:\n    moe: {}\n"
)

META = """\
hardware: Toy
model: toy/Model-1B
variant: bf16
architecture: toy
engine_effective: {max_num_batched_tokens: 64, max_num_seqs: 8}
skew_fit: {enabled: false}
"""

SKEW_META = """\
hardware: Toy
model: toy/Model-1B
variant: bf16
architecture: toy
skew_fit:
  enabled: true
  bucket_axes:
    n_bins: [0, 2, 8]
    n_labels: [few, many]
    skew_rate_bins: [-0.01, 0.5, 1.01]
    skew_rate_labels: [low, high]
    kv_big_bins: [0, 128, 4096]
    kv_big_labels: [short, long]
    kp_bins: [-1, 0, 4096]
    kp_labels: [none, some]
  per_tp:
    1: {alpha_default: 0.25, bucket_table: tp1/skew_fit.csv}
"""

DENSE_AT_1 = {
    "embedding": 1.0,
    "layernorm": 2.0,
    "qkv_proj": 10.0,
    "o_proj": 5.0,
    "down_proj": 20.0,
    "final_layernorm": 3.0,
}
"""Microseconds at one token; a token more costs a tenth of it."""


def dense_csv(scale: float = 1.0) -> str:
    lines = ["layer,tokens,time_us"]
    for layer, at_one in DENSE_AT_1.items():
        lines += [f"{layer},{t},{scale * at_one * (1 + 0.1 * (t - 1)):.6g}" for t in (1, 2, 8, 64)]
    return "\n".join(lines) + "\n"


PER_SEQUENCE = "layer,sequences,time_us\nlm_head,1,100\nlm_head,8,107\nsampler,1,4\nsampler,8,18\n"
EXPERTS = "tokens,activated_experts,time_us\n1,2,30\n64,2,60\n1,4,50\n64,4,120\n"
SKEW_FIT = """\
pc,n_label,skew_rate_label,kv_big_label,kp_label,alpha,n_samples
0,few,high,short,none,0.5,4
0,few,high,long,none,0.75,4
0,many,low,short,none,0,4
0,many,low,long,none,0.125,4
16,few,low,short,some,0.9,4
"""


def attention_csv() -> str:
    """Microseconds on a small grid; some pairs are left out on purpose."""
    lines = ["prefill_chunk,kv_prefill,n_decode,kv_decode,time_us"]
    for pc in (0, 16, 64):
        for nd in (0, 1, 2, 8):
            if (pc, nd) in ((0, 0), (64, 8)):
                continue
            for kp in (0, 16, 256) if pc else (0,):
                for kd in (16, 64, 256) if nd else (0,):
                    us = 5 + 0.37 * pc + 0.0021 * pc * kp + 0.013 * nd * kd + 0.7 * nd
                    lines.append(f"{pc},{kp},{nd},{kd},{us:.6g}")
    return "\n".join(lines) + "\n"


def write_bundle(root: Path, *, tp2: bool = False, moe: bool = False, skew: bool = False) -> Path:
    """Write a bundle below `root` and return its directory."""
    (root / "architectures").mkdir(parents=True, exist_ok=True)
    text = MOE_ARCHITECTURE if moe else ARCHITECTURE
    (root / "architectures" / "toy.yaml").write_text(text)
    bundle = root / "Toy" / "toy" / "Model-1B" / "bf16"
    for tp in (1, 2) if tp2 else (1,):
        folder = bundle / f"tp{tp}"
        folder.mkdir(parents=True)
        (folder / "dense.csv").write_text(dense_csv(1 / tp))
        (folder / "per_sequence.csv").write_text(PER_SEQUENCE)
        (folder / "attention.csv").write_text(attention_csv())
    (bundle / "meta.yaml").write_text(SKEW_META if skew else META)
    if skew:
        (bundle / "tp1" / "skew_fit.csv").write_text(SKEW_FIT)
    if moe:
        (bundle / "tp1" / "moe.csv").write_text(EXPERTS)
    return bundle
