"""Published runs of LLMServingSim, to the nanosecond: end clocks and every row."""

import pytest

from emu.errors import Deadlock, InputError
from emu.lab.parity.instance import ParityOptions
from emu.workload.items import Line, Turn
from tests.astra.golden import RUNS, SHARED, own_rows, published_rows, run, run_on, run_published

pytestmark = [
    pytest.mark.shared,
    pytest.mark.skipif(not SHARED.exists(), reason="needs ../shared/data"),
]
LONG = ("moe_dp_tp_pp", "moe_two_nodes", "moe_dp_tp")
QUICK = ("single", "two", "prefill_decode", "cxl", "pp", "moe", "pim")


def check(name):
    result = run_published(name)
    assert result.clock_ns == RUNS[name].clock_ns
    if RUNS[name].results is not None:
        path = SHARED / f"llmservingsim-outputs/example_{RUNS[name].results}_run.csv"
        assert own_rows(result) == published_rows(path)


@pytest.mark.parametrize("name", QUICK)
def test_example(name):
    check(name)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in RUNS if name not in (*QUICK, *LONG)])
def test_example_slow(name):
    check(name)


@pytest.mark.nightly
@pytest.mark.parametrize("name", LONG)
def test_long_example(name):
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpu", "seqs", "clock", "preemptions"),
    [
        pytest.param("RTX4090", 256, 183_706_634_969, 194, marks=pytest.mark.nightly),
        ("RTXPRO6000", 128, 64_679_407_283, 0),
    ],
)
def test_benchmark_of_300_requests(gpu, seqs, clock, preemptions):
    folder = SHARED / f"vllm-measured/{gpu}-Llama-3.1-8B"
    result = run(
        folder / "config.json",
        SHARED / "workloads/sharegpt-llama-3.1-8b-300-sps10.jsonl",
        ParityOptions(max_num_seqs=seqs),
    )
    assert result.clock_ns == clock
    assert result.preemptions == preemptions
    assert own_rows(result) == published_rows(folder / "llmservingsim-sim.csv")


def run_lines(lines, **options):
    return run_on(
        SHARED / "llmservingsim-clusters/rtx4090_single_instance.json",
        [Line(arrival_time_ns=a, input_toks=i, output_toks=o) for a, i, o in lines],
        ParityOptions(**options),
    )


def test_the_worked_example():
    result = run_lines([(1_000_000, 512, 4), (5_000_000, 300, 3)])
    assert result.clock_ns == 120_783_057
    first, second = sorted(result.rows, key=lambda row: row.request_id)
    assert (first.latency_ns, first.queuing_ns, first.ttft_ns) == (119_783_057, 0, 48_305_605)
    assert first.itl_ns == [37_040_268, 17_218_496, 17_218_688]
    assert (second.queuing_ns, second.ttft_ns) == (44_305_605, 81_345_873)
    assert (first.tpot_ns, second.tpot_ns) == (23_825_817, 17_218_592)


def test_only_the_idle_grid_makes_an_idle_replica_late():
    lines = [(1_000_000, 512, 1), (900_000_500, 512, 1)]
    faithful, exact = run_lines(lines), run_lines(lines, idle_grid=False)
    # The first one ends at 49,305,605; the clock then moves in whole milliseconds.
    assert [row.queuing_ns for row in faithful.rows] == [0, 305_105]
    assert [row.queuing_ns for row in exact.rows] == [0, 0]
    assert faithful.clock_ns - exact.clock_ns == 305_105


def test_sessions_release_the_next_turn_when_one_ends():
    turns = [Turn(input_toks=64, output_toks=2, tool_duration_ns=7_000_000)] * 2
    lines = [Line(arrival_time_ns=1_000_000, session_id="s", sub_requests=turns)]
    cluster = SHARED / "llmservingsim-clusters/rtx4090_single_instance.json"
    first, second = run_on(cluster, lines, ParityOptions(idle_grid=False)).rows
    assert second.arrival_ns == first.end_ns + 7_000_000
    assert second.latency_ns == first.latency_ns


def test_a_group_ends_without_the_grid():
    # The last member is told the end only after the others have become empty: nothing happens in
    # between, so one more question is needed.
    lines = [Line(arrival_time_ns=a, input_toks=40, output_toks=3) for a in (1_000, 9_000_000)]
    cluster = SHARED / "llmservingsim-clusters/single_node_dp_instance.json"
    exact = run_on(cluster, lines, ParityOptions(idle_grid=False))
    faithful = run_on(cluster, lines, ParityOptions())
    assert len(exact.rows) == len(faithful.rows) == 2
    assert exact.clock_ns <= faithful.clock_ns


def test_arrivals_at_their_own_instant_are_no_later():
    lines = [Line(arrival_time_ns=a, input_toks=300, output_toks=4) for a in (1, 7_000_003)]
    cluster = SHARED / "llmservingsim-clusters/single_node_multi_instance.json"
    late = run_on(cluster, lines, ParityOptions())
    exact = run_on(cluster, lines, ParityOptions(late_arrivals=False))
    assert [row.queuing_ns for row in exact.rows] == [0, 0]
    assert late.rows[1].queuing_ns > 0


def test_a_run_that_can_never_end_is_named():
    # Two equal prompts of whole chunks: the second is found complete in the shared tier, nothing
    # is left to compute, and the original's clock runs on for ever.
    ids = list(range(512))
    lines = [
        Line(arrival_time_ns=a, input_toks=512, output_toks=2, input_tok_ids=ids)
        for a in (1_000, 200_000_000)
    ]
    cluster = SHARED / "llmservingsim-clusters/single_node_multi_instance.json"
    options = ParityOptions(prefix_storage="cpu", prefix_sharing=True)
    try:
        result = run_on(cluster, lines, options)
    except Deadlock as error:
        assert "nothing can ever happen again" in str(error)
    else:
        assert len(result.rows) == 2


@pytest.mark.parametrize(
    ("cluster", "options", "problem"),
    [
        ("single_node_single_instance_H100", {}, "no bundle for 'H100'"),
        ("rtx4090_tp2_instance", {}, "no folder tp2"),
        ("single_node_single_instance", {"prefix_storage": "cxl"}, "cxl_mem: there is none"),
        ("single_node_single_instance", {"attention_offloading": True}, "cpu_mem.pim_config"),
        ("single_node_single_instance", {"kv_cache_dtype": "fp8"}, "no variant 'bf16-kvfp8'"),
    ],
)
def test_what_a_run_lacks_is_named(cluster, options, problem):
    path = SHARED / f"llmservingsim-clusters/{cluster}.json"
    with pytest.raises(InputError, match=problem):
        run_on(
            path, [Line(arrival_time_ns=1, input_toks=4, output_toks=2)], ParityOptions(**options)
        )
