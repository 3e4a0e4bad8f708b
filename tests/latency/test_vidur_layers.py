"""Vidur's tables as layer times: what they replace, and what they refuse."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from emu.backends.vidur import VidurBackend, VidurLayers, device_name
from emu.catalogue.lookup import lookup_gpu, lookup_model
from emu.cli import main
from emu.errors import InputError
from emu.latency.base import BatchShape, stepped_decode_run
from emu.latency.roofline import RooflineBackend
from tests.shared_data import SHARED, needs_shared

MODEL = "meta-llama/Llama-2-7b-hf"
OPERATIONS = {
    "emb": 0.01,
    "input_layernorm": 0.02,
    "attn_pre_proj": 0.3,
    "attn_rope": 0.03,
    "attn_post_proj": 0.1,
    "post_attention_layernorm": 0.02,
    "mlp_up_proj": 0.5,
    "mlp_act": 0.04,
    "mlp_down_proj": 0.25,
    "add": 0.01,
}
FACTS = {"n_head": 32, "n_kv_head": 32, "n_embd": 4096, "n_expanded_embd": 11008}


def write_tables(root: Path, **facts: object) -> Path:
    """One model at TP 1 and 2; times double from 1 to 1001 tokens."""
    place = root / "compute" / "h100" / "meta-llama" / "Llama-2-7b-hf"
    place.mkdir(parents=True)
    rows = []
    for tp in (1, 2):
        for tokens in (1, 1001):
            scale = (1 + (tokens - 1) / 1000) / tp
            row = {f"time_stats.{name}.median": ms * scale for name, ms in OPERATIONS.items()}
            row |= FACTS | {"use_gated_mlp": True} | facts
            rows.append(row | {"num_tokens": tokens, "num_tensor_parallel_workers": tp})
    write_csv(place / "mlp.csv", rows)
    network = root / "network" / "h100_dgx"
    network.mkdir(parents=True)
    columns = ("num_workers", "devices_per_node", "size", "time_stats.all_reduce.median")
    reduced = [(2, 2, 8192, 0.02), (2, 1, 8192, 9.0), (2, 2, 81920, 0.05), (4, 4, 8192, 7.0)]
    write_csv(network / "all_reduce.csv", [dict(zip(columns, r, strict=True)) for r in reduced])
    return root


def write_csv(path: Path, rows: list[dict[str, object]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def backend(root: Path, tp: int = 1) -> VidurBackend:
    spec = lookup_model(MODEL)
    layers = VidurLayers(root, "h100", spec, tp)
    return VidurBackend(layers, RooflineBackend(spec, lookup_gpu("H100"), tp=tp), spec.layers)


def decodes(count: int, context: int) -> BatchShape:
    return BatchShape(
        decode_count=count,
        decode_context_sum=count * context,
        decode_context_max=context,
        decode_context_min=context,
        sequences=count,
    )


def test_layers_are_the_tables_and_the_rest_is_the_other_backends(tmp_path: Path) -> None:
    vidur = backend(write_tables(tmp_path))
    shape = BatchShape(prefill_new=[501], prefill_context=[0], sequences=1)
    parts, theirs = vidur.components_ns(shape), vidur.rest.components_ns(shape)
    assert parts["embedding"] == 15_000
    assert parts["norm"] == 32 * (30_000 + 30_000 + 15_000) + 30_000  # and the last norm
    assert parts["rotary"] == 32 * 45_000
    assert parts["dense"] == 32 * (450_000 + 150_000 + 750_000 + 60_000 + 375_000)
    for name in ("attention_prefill", "lm_head", "sampler", "cpu_overhead"):
        assert parts[name] == theirs[name]
    assert sum(parts.values()) == vidur.iteration_ns(shape)


def test_all_reduces_are_those_of_ranks_in_one_machine(tmp_path: Path) -> None:
    vidur = backend(write_tables(tmp_path), tp=2)
    assert vidur.components_ns(decodes(1, 50))["collectives"] == 64 * 20_000
    assert vidur.components_ns(decodes(10, 50))["collectives"] == 64 * 50_000


def test_a_run_of_decodes_equals_stepping(tmp_path: Path) -> None:
    vidur = backend(write_tables(tmp_path))
    shape = decodes(7, 300)
    np.testing.assert_array_equal(
        vidur.decode_run_ns(shape, 40), stepped_decode_run(vidur, shape, 40)
    )


def test_a_part_of_the_layers_costs_its_part(tmp_path: Path) -> None:
    vidur = backend(write_tables(tmp_path))
    shape = BatchShape(prefill_new=[501], prefill_context=[0], sequences=1)
    whole = vidur.components_ns(shape)
    halves = [BatchShape([501], [0], sequences=1, start_layer=s, layers=16) for s in (0, 16)]
    for name in ("dense", "norm", "rotary", "embedding"):
        assert sum(vidur.components_ns(half)[name] for half in halves) == whole[name]


def test_what_the_tables_do_not_cover_is_refused(tmp_path: Path) -> None:
    root = write_tables(tmp_path / "tables")
    for model, tp, device, said in (
        ("meta-llama/Llama-3.1-8B", 1, "h100", "no mlp.csv of meta-llama/Llama-3.1-8B; there is"),
        (MODEL, 4, "h100", "4 was not measured; the file has 1, 2"),
        (MODEL, 1, "a40", "no compute/a40; it has h100"),
    ):
        with pytest.raises(InputError, match=said):
            VidurLayers(root, device, lookup_model(model), tp)
    other = write_tables(tmp_path / "other", n_kv_head=8)
    with pytest.raises(InputError, match=r"n_kv_head: measured for 8, but .* has 32"):
        VidurLayers(other, "h100", lookup_model(MODEL), 1)
    with pytest.raises(InputError, match=r"Vidur has no measurements of L40S; it has A40"):
        device_name("L40S", "", "c.toml")


CONFIG = """\
[model]
name = "meta-llama/Llama-2-7b-hf"
[[nodes]]
gpu = "H100"
[[replicas]]
[workload.synthetic]
requests = 5
[latency]
backend = "vidur"
path = "tables"
[output]
report = false
"""


def test_a_config_names_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tables(tmp_path / "tables")
    Path("c.toml").write_text(CONFIG)
    assert main(["run", "c.toml", "--quiet"]) == 0
    assert "mlp.csv: measured up to 1,001 tokens" in capsys.readouterr().err
    for change, said in (
        ("replicas.0.pipeline_parallel=2", "the vidur backend has no pipeline stages"),
        ("model.dtype=fp8", "Vidur measured 16-bit weights, not fp8"),
        ("latency.path=", "missing; backend"),
    ):
        more = ["--set", "nodes.0.gpus=2", "--set", change]
        assert main(["validate", "c.toml", *more]) == 2
        (error,) = capsys.readouterr().err.splitlines()
        assert said in error


@needs_shared
@pytest.mark.shared
@pytest.mark.parametrize("gpu", ["A100", "H100"])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_the_published_tables_are_read(gpu: str, tp: int) -> None:
    spec, root = lookup_model(MODEL), SHARED / "vidur-profiles"
    device = device_name(lookup_gpu(gpu).name, "", "config")
    layers = VidurLayers(root, device, spec, tp)
    assert layers.last == 4096
    small, large = (
        sum(layers.components_ns(n, 32, is_first=True, is_last=True).values()) for n in (1, 4096)
    )
    # Weights alone: 13 GB at no more than the memory's bandwidth.
    assert small > 12.9e9 / tp / (lookup_gpu(gpu).memory_gbytes_per_s)
    assert large > 5 * small
