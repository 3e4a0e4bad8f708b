"""Helpers for runs of LLMServingSim: published rows, and rows of ours in the same form."""

import ast
import csv

from benchmarks.faithful import RUNS, SHARED, read_requests, run_on, run_published

__all__ = ["RUNS", "SHARED", "own_rows", "published_rows", "run", "run_on", "run_published"]


def run(cluster_path, workload, options, limit=0):
    return run_on(cluster_path, read_requests(workload, limit), options)


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
