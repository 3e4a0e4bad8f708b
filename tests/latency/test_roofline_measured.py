"""How far the roofline is from measured iterations that its coefficients were not fitted to.

The bounds are the errors found, rounded up: they detect a change of the model, they do not prove
it. GPU time only (no host term, no collectives).
"""

from pathlib import Path

import numpy as np
import pytest

from emu.catalogue import lookup_gpu, lookup_model
from emu.latency.base import BatchShape
from emu.latency.roofline import RooflineBackend
from tests.csvfile import csv_rows

PROFILES = Path(__file__).parents[3] / "shared/data/profiles"
BATCHES = (1, 2, 8, 32, 64, 128, 256)


def shape(decodes=0, context=0, new=0, cached=0):
    return BatchShape(
        prefill_new=[new] if new else [],
        prefill_context=[cached] if new else [],
        decode_count=decodes,
        decode_context_sum=decodes * context,
        sequences=decodes + bool(new),
    )


@pytest.mark.parametrize(
    ("batch", "measured_ms"),
    [
        # Llama-3.1-8B on one H100 SXM with vLLM 0.24: NVIDIA's kernel database (aiconfigurator).
        (shape(1, 1024), 6.2),
        (shape(8, 1024), 6.6),
        (shape(32, 1024), 8.3),
        (shape(64, 1024), 10.3),
        (shape(128, 1024), 12.8),
        (shape(256, 1024), 19.6),
        (shape(new=128), 7.6),
        (shape(new=1024), 22.1),
        (shape(new=8192), 199.7),
        (shape(new=512, cached=512), 12.2),
        (shape(32, 1024, new=512), 15.0),
        (shape(32, 1024, new=2048), 45.7),
    ],
)
def test_h100_within_fifteen_percent_of_nvidias_measurements(batch, measured_ms):
    backend = RooflineBackend(lookup_model("Llama-3.1-8B"), lookup_gpu("H100"))
    assert backend.iteration_ns(batch) / 1e6 == pytest.approx(measured_ms, rel=0.15)


class Profile:
    """Measured layer times of a bundle, interpolated linearly; grid points for attention."""

    def __init__(self, folder):
        self.curves = {}
        self.attention = {}
        self.moe = {}
        for file, key in (("dense", "tokens"), ("per_sequence", "sequences")):
            for row in csv_rows(folder / f"{file}.csv"):
                curve = self.curves.setdefault(row["layer"], {})
                curve[int(row[key])] = float(row["time_us"])
        for row in csv_rows(folder / "attention.csv"):
            axes = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
            self.attention[tuple(int(row[axis]) for axis in axes)] = float(row["time_us"])
        if (folder / "moe.csv").exists():
            for row in csv_rows(folder / "moe.csv"):
                curve = self.moe.setdefault(int(row["activated_experts"]), {})
                curve[int(row["tokens"])] = float(row["time_us"])

    def at(self, layer, x):
        curve = self.curves.get(layer, {0: 0.0})
        return float(np.interp(x, sorted(curve), [curve[key] for key in sorted(curve)]))

    def iteration_us(self, spec, tokens, rows, attention_us):
        block = attention_us + 2 * self.at("layernorm", tokens)
        for layer in ("qkv_proj", "qk_norm", "rotary_emb", "o_proj"):
            block += self.at(layer, tokens)
        if spec.experts:
            share = spec.experts.per_token / spec.experts.count
            met = spec.experts.count * (1 - (1 - share) ** tokens)
            by_count = [
                float(
                    np.interp(
                        tokens, sorted(self.moe[n]), [self.moe[n][t] for t in sorted(self.moe[n])]
                    )
                )
                for n in sorted(self.moe)
            ]
            block += float(np.interp(met, sorted(self.moe), by_count))
        for layer in ("gate_up_proj", "act_fn", "down_proj"):
            block += self.at(layer, tokens)
        head = self.at("final_layernorm", tokens) + self.at("lm_head", rows)
        return spec.layers * block + head + self.at("sampler", rows) + self.at("embedding", tokens)


@pytest.mark.shared
@pytest.mark.skipif(not PROFILES.exists(), reason="needs ../shared/data/profiles")
@pytest.mark.parametrize(
    ("gpu", "model", "tp", "decode_mean", "decode_worst", "prefill_mean", "prefill_worst"),
    [
        # No measured set: a RTX 4090 holds its boost clock, its products reach 98 % of the peak.
        ("RTX4090", "meta-llama/Llama-3.1-8B", 1, 0.13, 0.26, 0.31, 0.50),
        ("RTXPRO6000", "meta-llama/Llama-3.1-8B", 1, 0.05, 0.10, 0.05, 0.08),
        ("RTXPRO6000", "meta-llama/Llama-3.1-8B", 2, 0.07, 0.12, 0.06, 0.10),
        ("RTXPRO6000", "Qwen/Qwen3-32B", 1, 0.06, 0.12, 0.07, 0.13),
        ("RTXPRO6000", "Qwen/Qwen3-30B-A3B-Instruct-2507", 1, 0.11, 0.40, 0.09, 0.28),
    ],
)
def test_profiled_gpus(gpu, model, tp, decode_mean, decode_worst, prefill_mean, prefill_worst):
    spec = lookup_model(model)
    profile = Profile(PROFILES / gpu / model / "bf16" / f"tp{tp}")
    backend = RooflineBackend(
        spec, lookup_gpu(gpu), tp=tp, collective_ns=lambda kind, size, ranks: 0
    )

    def error(tokens, rows, key, batch):
        measured_us = profile.iteration_us(spec, tokens, rows, profile.attention[key])
        return abs(backend.iteration_ns(batch) / 1e3 / measured_us - 1)

    decodes = [
        error(n, n, (0, 0, n, kv), shape(n, kv)) for n in BATCHES for kv in (512, 1024, 2048, 4096)
    ]
    prefills = [
        error(new, 1, (new, kv, 0, 0), shape(new=new, cached=kv))
        for new in (16, 128, 256, 512, 2048)
        for kv in (0, 512, 4096)
    ]
    figures = [np.mean(decodes), max(decodes), np.mean(prefills), max(prefills)]
    assert figures[0] < decode_mean
    assert figures[1] < decode_worst
    assert figures[2] < prefill_mean
    assert figures[3] < prefill_worst
