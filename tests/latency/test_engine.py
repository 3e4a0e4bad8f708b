"""The engine between kernels: graphs, overlap, sampler, front end, files."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest

from emu.catalogue import list_models, lookup_gpu, lookup_model
from emu.config.schema import VllmTable
from emu.engines.bundle import Deployment
from emu.engines.registry import BUNDLES
from emu.engines.vllm import vllm_kernels
from emu.latency.base import BatchShape
from emu.latency.ends import packed
from emu.latency.engine import (
    padded,
)
from emu.latency.engine_steps import EngineSteps
from emu.latency.front_end import Intake, OutputStream
from emu.latency.roofline import RooflineBackend
from emu.latency.sampling import SamplerCost, Sampling, _published, resolve_sampling
from tests.latency.shapes import decodes

ENGINE = BUNDLES["vllm-0.15"].model
GREEDY = Sampling("greedy", False)


def steps(model="Llama-3.1-8B", engine=ENGINE, sampling=GREEDY, overlapped=True, seqs=128, fused=0):
    spec = lookup_model(model)
    return EngineSteps(
        engine,
        sampling,
        layers=spec.layers,
        vocab=spec.vocab,
        gbytes_per_s=3350,
        max_num_seqs=seqs,
        max_num_batched_tokens=2048,
        overlapped=overlapped,
        fused_bytes_max=fused,
    )


def backend(model="Llama-3.1-8B", gpu="H100", **options):
    return RooflineBackend(lookup_model(model), lookup_gpu(gpu), engine=steps(model, **options))


def prompt(tokens, context=0):
    return BatchShape(prefill_new=[tokens], prefill_context=[context], sequences=1)


# --- graphs and overlap -------------------------------------------------------------------------
def test_batches_run_at_captured_sizes():
    sizes = [padded(n, 512) for n in (1, 2, 3, 5, 8, 9, 83, 256, 257, 500, 512, 513)]
    assert sizes == [1, 2, 4, 8, 8, 16, 88, 256, 272, 512, 512, 513]


def test_the_largest_graph_follows_the_limits_of_the_server():
    assert ENGINE.graph_limit(128, 2048) == 256
    assert ENGINE.graph_limit(1024, 8192) == 512
    assert ENGINE.graph_limit(1024, 100) == 100


def test_a_padded_batch_costs_what_the_captured_one_does_but_for_its_rows():
    of = backend()
    parts, full = of.components_ns(decodes(83, 100)), of.components_ns(decodes(88, 100))
    assert parts["dense"] == full["dense"]
    assert parts["lm_head"] <= full["lm_head"]
    assert parts["sampler"] < full["sampler"]


def test_a_small_prompt_among_decodes_costs_what_a_decode_does():
    """Pieces of graphs: no launches on top (the mixed step costs a decode step within 0.9 ms)."""
    of = backend()
    mixed = decodes(40, 600)
    mixed.prefill_new, mixed.prefill_context, mixed.sequences = [16], [560], 41
    difference_ns = of.iteration_ns(mixed) - of.iteration_ns(decodes(41, 600))
    assert 0 <= difference_ns < 900_000


def test_one_prompt_token_is_a_decode():
    shape = decodes(1, 576)
    assert backend().iteration_ns(shape) == backend().iteration_ns(decodes(1, 576))


def test_above_the_largest_graph_a_small_model_waits_for_launches():
    of = backend("Qwen2.5-0.5B", gpu="B200")
    least_ns, _ = steps("Qwen2.5-0.5B").host_bounds_ns(prompt(257))
    assert of.iteration_ns(prompt(257)) == least_ns
    assert of.iteration_ns(prompt(256)) < least_ns


def test_a_step_is_the_longer_of_host_and_gpu():
    slow_host = msgspec.structs.replace(ENGINE, host_step_ns=50_000_000)
    bound, _ = steps(engine=slow_host).host_bounds_ns(decodes(1, 10))
    assert backend(engine=slow_host).iteration_ns(decodes(1, 10)) == bound
    both = backend(engine=slow_host, overlapped=False).iteration_ns(decodes(1, 10))
    assert both > bound + 4_000_000


def test_leaps_under_a_host_bound_equal_steps():
    slow_host = msgspec.structs.replace(ENGINE, host_step_ns=7_300_000)
    of = backend(engine=slow_host)
    shape = decodes(100, 100)
    ends = of.decode_run_ns(shape, 2000)
    single, now = [], 0
    for step in range(2000):
        now += of.iteration_ns(decodes(100, 100 + step))
        single.append(now)
    assert ends.tolist() == single


def test_a_later_engine_fuses_norms_into_all_reduces_on_hopper():
    later = BUNDLES["vllm-0.19"].model
    fusing, before = vllm_kernels(later), vllm_kernels(ENGINE)
    assert fusing.fused_bytes_max("hopper", 2) == 64 << 20
    assert fusing.fused_bytes_max("ada", 2) == before.fused_bytes_max("hopper", 2) == 0
    spec, gpu = lookup_model("Llama-3.1-8B"), lookup_gpu("H100")
    fused, plain = (
        RooflineBackend(spec, gpu, tp=2, engine=steps(engine=later, fused=most))
        for most in (64 << 20, 0)
    )
    parts, before = fused.components_ns(decodes(8, 100)), plain.components_ns(decodes(8, 100))
    assert parts["norm"] < before["norm"] / 10
    assert parts["collectives"] == before["collectives"]


def test_a_step_that_nothing_hides_takes_longer_where_ranks_are_processes():
    spec, gpu = lookup_model("Llama-3.1-8B"), lookup_gpu("H100")
    table = VllmTable()
    alone, two = (Deployment(gpu=gpu, model=spec, ranks=ranks, scheduler=table) for ranks in (1, 2))
    for label in ("vllm-0.11", "vllm-0.15"):
        engine = BUNDLES[label]
        assert engine.on_gpu(engine.model, alone) == engine.model
        more = engine.on_gpu(engine.model, two).host_step_ns - engine.model.host_step_ns
        assert more == engine.model.host_ranks_ns == (470_000 if label == "vllm-0.11" else 0)


# --- sampler ------------------------------------------------------------------------------------
def test_a_sorted_vocabulary_costs_by_rows_and_bandwidth():
    sort = Sampling("top_p", False)
    fast = SamplerCost(ENGINE, sort, 128_256, 3350)
    slow = SamplerCost(ENGINE, sort, 128_256, 864)
    rows = fast.gpu_ns(64) - fast.gpu_ns(0)
    assert slow.gpu_ns(64) - slow.gpu_ns(0) == pytest.approx(rows * 3350 / 864, rel=1e-6)
    assert fast.gpu_ns(64) > 3 * SamplerCost(ENGINE, GREEDY, 128_256, 3350).gpu_ns(64)


def test_a_later_engine_cuts_it_with_one_kernel_from_eight_rows_on():
    later = SamplerCost(BUNDLES["vllm-0.19"].model, Sampling("top_p", False), 128_256, 3350)
    assert later.gpu_ns(8) < later.gpu_ns(7)


def test_penalties_make_the_gpu_wait_for_the_host():
    with_penalties = SamplerCost(ENGINE, Sampling("top_p", True), 152_064, 3350)
    assert with_penalties.penalty_ns > 0
    assert with_penalties.penalty_sequence_ns > 0
    without = SamplerCost(ENGINE, GREEDY, 152_064, 3350)
    assert without.penalty_ns == without.penalty_sequence_ns == 0


def test_the_generation_config_decides_unless_the_configuration_does():
    assert resolve_sampling("auto", "auto", "Qwen/Qwen2.5-7B") == ("top_p", True)
    assert resolve_sampling("greedy", "auto", "Qwen/Qwen2.5-7B") == ("greedy", False)
    assert resolve_sampling("auto", "off", "Qwen/Qwen2.5-7B") == ("top_p", False)
    assert resolve_sampling("auto", "auto", "codellama/CodeLlama-34b-Instruct-hf") == (
        "random",
        False,
    )
    assert resolve_sampling("auto", "auto", "nobody/knows") == ("random", False)


def test_every_model_with_a_published_generation_config_is_in_the_catalogue():
    assert set(_published()) - {"default"} <= set(list_models())


# --- front end ----------------------------------------------------------------------------------
def test_requests_queue_for_the_api_server():
    intake = Intake([ENGINE])
    alone = intake.ready_ns(0, 100)
    assert alone == ENGINE.intake_ns + ENGINE.batch_wait_ns + 100 * ENGINE.prompt_token_ns
    assert intake.ready_ns(0, 100) == alone + ENGINE.intake_ns
    assert intake.ready_ns(10**9, 100) == 10**9 + alone


def test_two_api_servers_take_requests_in_turn():
    intake = Intake([ENGINE, ENGINE])
    assert intake.ready_ns(0, 100) == intake.ready_ns(0, 100)


@pytest.mark.parametrize("grows", [False, True])
def test_events_of_a_leap_are_those_of_its_steps(grows: bool) -> None:
    rng = np.random.default_rng(1)
    for events in (1, 40, 200, 400):
        leaps, single = OutputStream(ENGINE), OutputStream(ENGINE)
        start_ns = 0
        for run in range(40):
            steps_ns = rng.integers(1_000_000, 30_000_000, 30)
            if grows:  # behind the first one, which may be the longest
                steps_ns[1:].sort()
            ends = np.cumsum(steps_ns)
            first = run % 2  # a step that another call has taken
            if first:
                leaps.step(start_ns + int(ends[0]), events)
            delay = leaps.run(start_ns, packed(ends), first, events, grows)
            for end in ends.tolist():
                last = single.step(start_ns + end, events)
            assert delay == last
            start_ns += int(ends[-1])
            if run % 3 == 0:  # a prompt between two runs
                for stream in (leaps, single):
                    stream.step(start_ns, 1, 1)
                assert leaps.first_delay_ns == single.first_delay_ns


@pytest.mark.parametrize("interval", [1, 20])
def test_copied_ids_of_a_leap_are_those_of_its_steps(interval: int) -> None:
    rng = np.random.default_rng(2)
    copying = msgspec.structs.replace(ENGINE, output_id_ns=18, stream_interval=interval)
    leaps, single = OutputStream(copying), OutputStream(copying)
    start_ns, made, events = 0, 700, 300
    for _ in range(20):
        ends = np.cumsum(rng.integers(1_000_000, 30_000_000, 30))
        delay = leaps.run(start_ns, packed(ends), 0, events, False, made)
        for end in ends.tolist():
            last = single.step(start_ns + end, events, 0, made)
            made += events
        assert delay == last
        start_ns += int(ends[-1])


def test_an_event_costs_more_for_each_token_that_its_request_has() -> None:
    copying = msgspec.structs.replace(ENGINE, output_id_ns=18)
    plain_ns = OutputStream(ENGINE).step(0, 4, 1)
    assert OutputStream(copying).step(0, 4, 1, 3_000) == plain_ns + 3_000 * 18 // 2
    assert OutputStream(copying, copies_ids=False).step(0, 4, 1, 3_000) == plain_ns


def test_decodes_beside_prompts_cost_the_host_their_ids_and_a_search() -> None:
    mixing = msgspec.structs.replace(ENGINE, host_mixed_id_ns=6, host_mixed_pair_ns=17)
    mixed = BatchShape([500], [0], 3, 900, 400, 200, 4)
    more_ns = 903 * 6 + 3 * 17
    for overlapped, at in ((True, 0), (False, 1)):
        plain = steps(overlapped=overlapped).host_bounds_ns(mixed)
        found = steps(engine=mixing, overlapped=overlapped).host_bounds_ns(mixed)
        assert found[at] == plain[at] + more_ns
        assert found[1 - at] == plain[1 - at]
        alone = decodes(3, 300)
        same = steps(overlapped=overlapped).host_bounds_ns(alone)
        assert steps(engine=mixing, overlapped=overlapped).host_bounds_ns(alone) == same


def test_tokens_that_leave_in_groups_saturate_the_stream_later() -> None:
    grouped = msgspec.structs.replace(ENGINE, stream_interval=20)
    events = 2 * 10_000_000 // ENGINE.output_event_ns
    stream = OutputStream(grouped)
    delays = {stream.step(step * 10_000_000, events) for step in range(50)}
    assert delays == {events * (ENGINE.output_event_ns // 20) // 2 + ENGINE.output_ns}


def test_a_first_token_is_an_event_of_its_own() -> None:
    grouped = msgspec.structs.replace(ENGINE, stream_interval=20)
    assert OutputStream(grouped).step(0, 8, 8) == OutputStream(ENGINE).step(0, 8)
    assert OutputStream(grouped).step(0, 8) < OutputStream(grouped).step(0, 8, 1)
    assert OutputStream(ENGINE).step(0, 8, 3) == OutputStream(ENGINE).step(0, 8)


def test_the_stream_saturates():
    stream = OutputStream(ENGINE)
    events = 2 * 10_000_000 // ENGINE.output_event_ns
    delays = [stream.step(step * 10_000_000, events) for step in range(50)]
    assert all(later > before for before, later in itertools.pairwise(delays))
    quiet = OutputStream(ENGINE)
    assert quiet.step(0, 10) == quiet.step(10_000_000, 10)


def test_a_first_token_waits_for_some_rounds_of_a_saturated_stream_at_most() -> None:
    stream = OutputStream(ENGINE)
    events = 2 * 10_000_000 // ENGINE.output_event_ns
    for step in range(50):
        stream.step(step * 10_000_000, events)
    late_ns = stream.step(500_000_000, events + 1, 1)
    round_ns = ENGINE.first_token_rounds * events * ENGINE.output_event_ns
    own_ns = (events + 1) * ENGINE.output_event_ns // 2 + ENGINE.output_ns
    assert stream.first_delay_ns == round_ns + own_ns
    assert late_ns > stream.first_delay_ns
    alone_ns = stream.step(10**12, 1, 1)
    assert stream.first_delay_ns == alone_ns, "a stream that is free lets both through at once"
    in_order = OutputStream(msgspec.structs.replace(ENGINE, first_token_rounds=0))
    for step in range(3):
        delay_ns = in_order.step(step, events, 1)
        assert in_order.first_delay_ns == delay_ns


def test_prompts_between_decodes_leave_the_length_of_a_round() -> None:
    stream = OutputStream(ENGINE)
    for step in range(50):
        stream.step(step * 1_000_000, 100)
    found = []
    for step in range(50, 53):
        stream.step(step * 1_000_000, 1, 1)
        found.append(stream.first_delay_ns)
    assert len(set(found)) == 1
