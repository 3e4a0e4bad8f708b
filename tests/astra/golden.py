"""The published runs of LLMServingSim: which cluster, which options, which clock at the end."""

import ast
import csv
from pathlib import Path

from emu.astra.parity import ParityRun, read_requests
from emu.astra.parity_cluster import read_cluster
from emu.astra.parity_replica import ParityOptions, make_instances

SHARED = Path(__file__).parents[2].parent / "shared/data"

SHARED_TIER = {"prefix_storage": "cpu", "prefix_sharing": True}
EXAMPLES = {
    # name: (cluster, options, clock at the end, result file)
    "single": ("single_node_single_instance", {}, 1_663_996_645, "single"),
    "two": ("single_node_multi_instance", {}, 1_664_893_230, "multi"),
    "prefill_decode": ("single_node_pd_instance", {}, 1_661_784_496, "pd"),
    "cxl": ("single_node_cxl_instance", {}, 12_112_686_177, "cxl"),
    "shared_tier": (
        "single_node_multi_instance", SHARED_TIER, 1_664_893_230, "prefix_cpu_mem_pool"),
    "two_nodes": ("dual_node_multi_instance", SHARED_TIER, 1_668_890_844, None),
    "power": ("single_node_power_instance", {}, 1_663_996_645, "power"),
    "pim": ("single_node_pim_instance", {"attention_offloading": True}, 1_643_150_716, "pim"),
    "pim_sub_batch": (
        "single_node_pim_instance", {"attention_offloading": True, "sub_batches": True},
        2_634_096_516, "pim_sub_batch"),
    "tp_pp": ("single_node_tp_pp_instance", {}, 1_469_287_243, "tp_pp"),
    "pp": ("single_node_pp_instance", {}, 1_770_875_992, "pp"),
    "dp": ("single_node_dp_instance", {}, 1_445_267_327, "dp"),
    "moe": ("single_node_moe_single_instance", {}, 1_945_309_759, "moe"),
    "moe_pp": ("single_node_moe_pp_instance", {}, 1_801_188_850, "moe_pp"),
    "moe_dp_tp": ("single_node_moe_dp_tp_instance", {}, 2_605_716_536, "moe_dp_tp"),
    "moe_dp_pp": ("single_node_moe_dp_pp_instance", {}, 1_435_561_517, "moe_dp_pp"),
    "moe_dp_tp_pp": ("single_node_moe_dp_tp_pp_instance", {}, 1_642_858_815, None),
    "moe_two_nodes": (
        "dual_node_moe_dp_ep_intra_inter_instance", {}, 1_850_687_236, None),
}  # fmt: skip


def run_on(cluster_path, lines, options):
    """One run; the result."""
    cluster = read_cluster(cluster_path, SHARED / "pim")
    return ParityRun(
        cluster, make_instances(cluster, SHARED / "profiles", options), lines, options
    ).run()


def run(cluster_path, workload, options, limit=0):
    return run_on(cluster_path, read_requests(workload, limit), options)


def run_example(name, **more):
    cluster, options, _, _ = EXAMPLES[name]
    return run(
        SHARED / f"llmservingsim-clusters/{cluster}.json",
        SHARED / "workloads/example_trace.jsonl",
        ParityOptions(**{**options, **more}),
    )


def published_rows(path):
    """Rows of a result file, in the form of `own_rows`."""
    names = ["instance id", "request id", "input", "output", "arrival", "end_time", "latency"]
    names += ["queuing_delay", "TTFT", "TPOT"]
    with path.open() as file:
        return [
            [int(row[name]) for name in names] + [ast.literal_eval(row["ITL"])]
            for row in csv.DictReader(file)
        ]


def own_rows(result):
    return [
        [
            r.instance, r.request_id, r.prompt_tokens, r.output_tokens, r.arrival_ns, r.end_ns,
            r.latency_ns, r.queuing_ns, r.ttft_ns, r.tpot_ns, r.itl_ns,
        ]
        for r in result.rows
    ]  # fmt: skip
