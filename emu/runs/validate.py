"""`emu validate`: what follows from a configuration, without a run."""

from __future__ import annotations

import bisect
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from emu.catalogue import sizes
from emu.cluster.backends import SharedBackends, range_warnings
from emu.cluster.plan import Plan, ReplicaPlan
from emu.cluster.prepare import prepare
from emu.cluster.start_up import start_up_of
from emu.config.load import effective_dict, load_config
from emu.config.places import blaming, placing
from emu.config.schema import Config, SchedulerTable, SglangTable, VllmTable
from emu.errors import printable
from emu.latency.base import LatencyBackend
from emu.latency.coefficients import kernels_told
from emu.process.console import is_drawn, is_plain, open_console, plain_table
from emu.runs.crowding import crowded
from emu.runs.inputs import named_plugins, named_programs
from emu.units import NS_PER_S

"""An image of 1,024 x 1,024 pixels has so many in Qwen3-VL."""


def validate_command(
    path: Path, overrides: Sequence[str], *, as_json: bool = False, imports: bool = False
) -> int:
    """Read everything, print the facts; InputError for the first mistake.

    `imports`: load classes of the user's own (their code runs) and look at what they have.
    """
    config = load_config(path, overrides)
    with blaming(overrides), placing(str(path)):
        plan, workload = prepare(config, str(path), imports=imports)
        latencies = _layer_times(plan)
    columns = facts(plan)
    code = code_of(config)
    warnings = [*workload.notes.warnings, *range_warnings(latencies), *crowded(plan)]
    if as_json:
        last_s = workload.last_arrival_ns / NS_PER_S
        found = {
            "replicas": columns,
            "requests": workload.count,
            "requests_refused": workload.notes.rejected,
            "last_arrival_s": last_s,
            "warnings": warnings,
            "code": code,
        }
        print(json.dumps(found, indent=2))
        return 0
    say = _print_table(f"{path}: valid", columns)
    last_s = workload.last_arrival_ns / NS_PER_S
    say(f"workload: {workload.count:,} requests, last arrival at {last_s:,.1f} s")
    if code:
        how = "imported here" if imports else "not run here; --plugins imports it"
        say(f"code that a run would run: {', '.join(code)} ({how})")
    for reason, count in workload.notes.rejected.items():
        say(f"refused: {count:,} requests, {reason}")
    for warning in warnings:
        print(f"warning: {printable(warning)}", file=sys.stderr)
    return 0


def _print_table(title: str, columns: dict[str, dict[str, str]]) -> Callable[[str], object]:
    """Facts by replicas; returns what prints the lines below them."""
    heads = ["", *(f"replicas {replicas}" for replicas in columns)]
    names = next(iter(columns.values()))
    rows = [[name, *(column[name] for column in columns.values())] for name in names]
    if is_plain():
        lines = plain_table(heads, rows, right=False)
        if len(title) <= len(lines[0]) and is_drawn([title, *lines]):
            spare = len(lines[0]) - len(title)
            print(" " * (spare // 2) + title + " " * (spare - spare // 2), *lines, sep="\n")
            return print
    from rich.table import Table  # a file or a pipe needs none of it

    table = Table(title=title, show_lines=False)
    for head in heads:
        table.add_column(head)
    for row in rows:
        table.add_row(*row)
    console = open_console()
    console.print(table)
    return partial(console.print, soft_wrap=True)


def code_of(config: Config) -> list[str]:
    """Classes and programs of the user's own that a run would run."""
    plain = effective_dict(config)
    named = [str(table[key]) for table, key in named_plugins(plain)]
    return list(dict.fromkeys([*named, *named_programs(plain)]))


def _layer_times(plan: Plan) -> list[tuple[LatencyBackend, SchedulerTable]]:
    """Backends that read measured layer times, with the schedulers that ask them.

    Raises InputError for what the files lack. Other backends read no such files.
    """
    backends = SharedBackends()
    return [
        (backends.of(context), replica.scheduler)
        for replica in plan.replicas
        if (context := replica.latency_context(plan.config)).table.backend in ("profile", "vidur")
    ]


def facts(plan: Plan) -> dict[str, dict[str, str]]:
    """Replicas (`0-3,8`) -> what is the same for all of them, by name."""
    alike: dict[tuple[str, ...], list[ReplicaPlan]] = {}
    for replica in plan.replicas:
        key = (str(replica.group), *_facts_of(replica, plan.config).values())
        alike.setdefault(key, []).append(replica)
    return {
        _ranges([replica.replica_id for replica in replicas]): _facts_of(replicas[0], plan.config)
        for replicas in alike.values()
    }


def _facts_of(replica: ReplicaPlan, config: Config) -> dict[str, str]:
    memory, model, node = replica.memory, replica.model, replica.node
    weight = max(memory.physical_weight_bytes)
    return {
        "role": replica.role,
        "model": f"{model.name} ({sizes.parameter_count(model) / 1e9:.2f} B parameters)",
        "gpus": f"{len(replica.gpus)} x {replica.gpu.name}"
        f" (TP {replica.tensor_parallel}, PP {replica.pipeline_parallel})",
        "type of weights": sizes.weights_told(model, replica.dtype),
        "weights per GPU": f"{weight / 1e9:.2f} GB",
        "engine keeps per GPU": f"{memory.reserve_bytes / 2**30:.2f} GiB",
        "type of KV": replica.kv_dtype,
        "KV per token": f"{memory.kv_bytes_token / 1024:.0f} KiB",
        **_kv_facts(replica),
        **_expert_facts(replica, config),
        **_feature_facts(replica, config),
        "engine": replica.engine_label,
        "scheduler": _scheduler_fact(replica.scheduler),
        "latency": _latency_fact(replica),
        **_start_facts(replica),
        "load from SSD": f"{weight * 8 / (node.ssd_gbps * 1e9):.2f} s",
        "load from host": f"{_host_load_s(replica, weight):.2f} s",
        "load over NIC": f"{weight * 8 / (node.nic_gbps * 1e9):.2f} s",
    }


def _scheduler_fact(table: SchedulerTable) -> str:
    """The policy; of vLLM's also its limits, which an engine may have filled in."""
    if not isinstance(table, VllmTable):
        return table.policy
    return f"{table.policy}: {table.requests_max:,} requests, {table.tokens_max:,} tokens a step"


def _feature_facts(replica: ReplicaPlan, config: Config) -> dict[str, str]:
    """What the features of its engine say of themselves."""
    return {
        name: text
        for feature in replica.features
        for name, text in feature.facts(replica, config).items()
    }


def _expert_facts(replica: ReplicaPlan, config: Config) -> dict[str, str]:
    """How its experts are shared with other replicas, where [engine] says so."""
    setting, experts = replica.experts, replica.model.experts
    if setting is None or experts is None:
        return {}
    from emu.latency.experts.routed import make_balance  # few replicas share experts so

    ranks, slots = replica.expert_parallel, setting.slots(experts.count)
    where = "GPUs of their own" if setting.is_apart else "ranks"
    words = f"{experts.count} in {slots} slots on {ranks} {where}, {setting.all2all}"
    if setting.is_apart:
        words += f", {setting.micro_batches} micro-batches"
    if setting.overlap != "none":
        words += f", {setting.overlap}"
    balance = make_balance(replica.latency_context(config), setting)
    if balance is not None:
        words += f", balancedness {balance.balancedness:.2f}"
    return {"experts": words}


def _start_facts(replica: ReplicaPlan) -> dict[str, str]:
    """How long its engine starts beside the load, by phases, where it has one."""
    found = start_up_of(replica)
    if found is None:
        return {}
    return {"start": f"{found.total_s:.0f} s ({found.told()}), without the load"}


def _latency_fact(replica: ReplicaPlan) -> str:
    """The backend; of the roofline also how far its GPU time may be off."""
    backend = replica.latency.backend
    if backend != "roofline":
        return backend
    return f"{backend} ({kernels_told(replica.gpu)})"


def _kv_facts(replica: ReplicaPlan) -> dict[str, str]:
    """Blocks and what they hold; for a hybrid model by kind of layer."""
    layout = replica.kv_layout
    if layout is None:
        tokens = replica.num_blocks * replica.scheduler.block_size
        kept = {"KV by layers": _kv_by_layers(replica)} if replica.state_bytes else {}
        table = replica.scheduler
        if kept and isinstance(table, SglangTable) and table.caches_prefixes:
            kept["states"] = (
                f"{table.max_mamba_cache_size:,} of requests and the prefix cache; "
                f"{table.requests_max:,} requests may run"
            )
        return kept | {
            "KV blocks": f"{replica.num_blocks:,} x {replica.scheduler.block_size} tokens",
            "KV tokens": f"{tokens:,}",
            "longest request": f"{min(replica.max_model_tokens, tokens):,}",
        }
    longest = bisect.bisect_left(
        range(replica.max_model_tokens), True, key=lambda tokens: not replica.can_hold(tokens + 1)
    )
    return {
        "KV by layers": _kv_by_layers(replica),
        "KV blocks": f"{replica.num_blocks:,} x {layout.block_bytes / 2**20:.2f} MiB, shared by "
        f"{len(layout.groups)} groups of layers",
        "prefix unit": f"{layout.block_tokens} tokens",
        "longest request": f"{longest:,}",
    }


def _kv_by_layers(replica: ReplicaPlan) -> str:
    """What each kind of layer keeps, all ranks together."""
    kinds: dict[str, list[int]] = {}
    for layer in map(replica.model.layer, range(replica.model.layers)):
        token = sizes.layer_kv_bytes_per_token(layer, replica.kv_dtype)
        state = sizes.layer_state_bytes(replica.model, layer, replica.dtype)
        entry = kinds.setdefault(layer.kind, [0, 0, 0])
        entry[0] += 1
        entry[1] += token
        entry[2] += state
    parts = []
    for kind, (count, token_bytes, state_bytes) in kinds.items():
        kept = [f"{token_bytes / 1024:g} KiB a token"] if token_bytes else []
        kept += [f"{state_bytes / 2**20:.1f} MiB a sequence"] if state_bytes else []
        parts.append(f"{count} {kind}: {', '.join(kept) or 'nothing'}")
    return "; ".join(parts)


def _ranges(ids: Sequence[int]) -> str:
    """Ascending numbers: [0, 1, 2, 8] -> `0-2,8`."""
    spans: list[list[int]] = []
    for number in ids:
        if spans and spans[-1][-1] == number - 1:
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    return ",".join("-".join(map(str, span)) for span in spans)


def _host_load_s(replica: ReplicaPlan, weight_bytes: int) -> float:
    """Seconds until all GPUs of a replica have read their weights from their machines' memory."""
    node = replica.node
    pcie = node.pcie_gbps if node.pcie_gbps > 0 else replica.gpu.pcie_gbps
    gpus = min(len(replica.gpus), node.gpus)
    over_pcie_s = weight_bytes * 8 * min(gpus, node.pcie_shared_by) / (pcie * 1e9)
    out_of_memory_s = weight_bytes * gpus / (node.host_memory_gbytes_per_s * 1e9)
    return max(over_pcie_s, out_of_memory_s)
