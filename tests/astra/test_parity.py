"""Published runs of LLMServingSim, to the nanosecond: end clocks and every row."""

import pytest

from emu.astra.parity_replica import ParityOptions
from emu.workload.items import Line, Turn
from tests.astra.golden import EXAMPLES, SHARED, own_rows, published_rows, run, run_example, run_on

pytestmark = [
    pytest.mark.shared,
    pytest.mark.skipif(not SHARED.exists(), reason="needs ../shared/data"),
]
QUICK = ("single", "two", "prefill_decode", "cxl", "pp", "moe", "pim")


def check(name):
    _, _, clock, results = EXAMPLES[name]
    result = run_example(name)
    assert result.clock_ns == clock
    if results is not None:
        path = SHARED / f"llmservingsim-outputs/example_{results}_run.csv"
        assert own_rows(result) == published_rows(path)


@pytest.mark.parametrize("name", QUICK)
def test_example(name):
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in QUICK])
def test_example_slow(name):
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpu", "seqs", "clock", "preemptions"),
    [("RTX4090", 256, 183_706_634_969, 194), ("RTXPRO6000", 128, 64_679_407_283, 0)],
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
