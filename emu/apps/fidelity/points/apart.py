"""What the servers of prefill and decode apart were started with, where launch scripts are public.

Owns what is read from NVIDIA/srt-slurm (github.com, `recipes/` at c88ef731, Apache-2.0), whose
files InferenceX's runs of DeepSeek-R1 on SGLang and TensorRT-LLM name: `apart.csv` beside this
module has a row for each file, with the limits of one rank (a server's limits are divided by its
ranks of attention, as SGLang does). A file is chosen by engine, GPU, precision, lengths, servers
and clients alone, never by what was measured.

What follows from a file and is no key of it: TensorRT-LLM's ranks of attention reach experts over
NVLink, one-sided (`select_alltoall_method_type` of its modules asks for attention data parallelism,
whole experts and NVLink); SGLang's run DeepEP where the file says so, and collectives elsewhere.
"""

from __future__ import annotations

import csv
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

import msgspec

from emu.apps.fidelity.points.table import Point, Servers

Keys = dict[str, int | float | bool | str]
_FILE: Final = Path(__file__).with_name("apart.csv")
_RACKS: Final = ("GB200", "GB300")
_PAGE_TOKENS: Final = 64
"""KV page of SGLang on Blackwell, where `max_total_tokens` limits a pool."""
_STEP_TOKENS: Final = 64
"""The least step that emu takes from a file: a block and more (decode servers say their batch)."""
_EXPERTS_OF_TOKEN: Final = 8
"""DeepSeek-R1's."""
_MACHINE_GPUS: Final = 8
_GATHERING: Final = "DEEPGEMM"
"""Kernels whose tokens are gathered, never exchanged."""
_DEEPGEMM_VERSION: Final = "1.1"
"""Whose servers run them when nothing is said."""
_RANDOM_EXPERTS: Final = "lognormal:2"
"""How unevenly prompts of random ids choose experts: twice the sigma of text. Fitted to what full
prefill servers of TensorRT-LLM get through, their ranks of attention whole experts each (requests a
second of a server; emu before, with this): DeepSeek-R1 with 1,024 tokens on 8 H200 36.5 (46,
42), 4 B200 in fp4 88 (113, 100), 4 GB200 in fp4 101 (123, 110), 8 GB200 in fp8 74 (111, 70). What
SGLang's rows lack is in its `_HANDOFF_NS`, which was fitted to experts that are chosen as by text.
"""
_SPLIT_EXPERTS: Final = "lognormal:1.5"
"""Where each expert is split over the ranks of attention, which no key says. DeepSeek-R1 in fp8 on
8 B200: 76 us of a GPU for a prompt's token, as emu has for a server of 8 ranks without attention
data parallelism (73), not to a row; that some unevenness stands in was chosen with the rows in
view."""
_ALWAYS_SINCE: Final = "2026"
"""TensorRT-LLM 1.2 exchanges whatever the number of ranks, on all hosts whose NVLinks are up; 1.1
if there are more ranks than experts of a token, on ARM hosts. Not on Hopper, as rows of H200 show
(of 8 ranks in one machine)."""


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """Servers of one role, and the limits of each of their ranks; 0 and empty = not said."""

    count: int
    """Servers."""
    tp: int
    """Ranks that share each layer of attention."""
    dp: int
    """Ranks of attention with requests of their own."""
    ep: int
    """Ranks that experts are dealt to; 1 = each is split over all."""
    requests: int
    """That run at a time."""
    step: int
    """Tokens of a step, or of a batch of prompts."""
    prefill: int
    """Second limit on the tokens of such a batch."""
    pool: int
    """Tokens of KV."""
    fraction: float
    """Of memory: SGLang's for weights and KV, TensorRT-LLM's of what is free."""
    captured: int
    """Sequences of the largest graph."""
    exchange: str
    """SGLang's library between ranks of experts; empty = collectives."""
    copies: int
    """Expert slots beyond the experts."""
    overlap: str
    """What hides the exchange, as `[engine] overlap` has it."""
    deepgemm: str
    """off: SGLang's dense products of 8 bits run FlashInfer's kernel."""
    interval: int
    """Tokens of a request between two events."""
    experts: str
    """TensorRT-LLM's kernels of experts."""


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """One file: two kinds of servers, and the loads that they were measured at."""

    engine: str
    gpu: str
    precision: str
    prompt: int
    """Tokens, at most."""
    output: int
    """Tokens, at most."""
    drafts: int
    """Of each step."""
    clients: tuple[int, ...]
    """Loads that it was measured at."""
    since: str
    until: str
    """Days of measurement, the last one not, between which it stood so; empty = any."""
    prefill: Side
    decode: Side


class RoleKeys(msgspec.Struct, frozen=True):
    """Keys of the replicas of one role."""

    scheduler: Keys
    engine: Keys
    latency: Keys


def launches_of(point: Point) -> list[Launch]:
    """The files that a point may have been started with, those that name its clients first.

    Files for other numbers of clients count where none names them: of the same servers, else of
    servers that are alike in all but their number.
    """
    if len(point.servers) != 2:
        return []
    alike = [one for one in _launches() if _is_alike(one, point)]
    same = [one for one in alike if _has_counts(one, point)]
    exact = [one for one in same if point.clients in one.clients]
    return exact or _nearest(same, point.clients) or _nearest(alike, point.clients)


def role_keys(launch: Launch, point: Point) -> Mapping[str, RoleKeys]:
    """Keys by role."""
    make = _sglang if point.engine == "sglang" else _tensorrt_llm
    sides = zip(point.servers, (launch.prefill, launch.decode), strict=True)
    return MappingProxyType({servers.role: make(servers, side, point) for servers, side in sides})


def as_launched(point: Point) -> Point:
    """The point with prefill servers of the ranks that its files say.

    Some rows state attention data parallelism where every file with their numbers of servers,
    decode servers and clients has tensor parallelism. Of five of six such rows the same was
    measured on another day too, within 2 per cent, and those rows state the files' ranks.
    """
    if len(point.servers) != 2:
        return point
    known = [one for one in _launches() if _is_for(one, point) and _has_counts(one, point)]
    exact = [one for one in known if point.clients in one.clients]
    mine = [one for one in exact if _has_ranks(one.decode, point.servers[1])]
    said, decodes = point.servers
    if not mine or any(_has_ranks(one.prefill, said) for one in mine):
        return point
    side = mine[0].prefill
    if side.tp * side.dp != said.tensor_parallel * said.data_parallel:
        return point  # other servers
    told = msgspec.structs.replace(
        said, tensor_parallel=side.tp, data_parallel=side.dp, expert_parallel=side.ep
    )
    return msgspec.structs.replace(point, servers=(told, decodes))


def _is_for(launch: Launch, point: Point) -> bool:
    """Whatever the servers."""
    what = (launch.engine, launch.precision, launch.prompt, launch.output)
    if what != (point.engine, point.precision, point.prompt_tokens, point.output_tokens):
        return False
    day = point.measured_on
    if day and not launch.since <= day < (launch.until or "9"):
        return False
    return "DeepSeek" in point.model and point.gpu.startswith(launch.gpu)


def _is_alike(launch: Launch, point: Point) -> bool:
    sides = zip((launch.prefill, launch.decode), point.servers, strict=True)
    return _is_for(launch, point) and all(_has_ranks(side, one) for side, one in sides)


def _has_ranks(side: Side, servers: Servers) -> bool:
    return (servers.tensor_parallel, servers.data_parallel) == (side.tp, side.dp)


def _has_counts(launch: Launch, point: Point) -> bool:
    sides = zip(point.servers, (launch.prefill, launch.decode), strict=True)
    return all(one.count == side.count for one, side in sides)


def _nearest(launches: Sequence[Launch], clients: int) -> list[Launch]:
    """The file for the most similar load, of each number of drafts."""
    found: dict[int, tuple[float, Launch]] = {}
    for one in launches:
        off = min(abs(math.log(clients / known)) for known in one.clients)
        if one.drafts not in found or off < found[one.drafts][0]:
            found[one.drafts] = off, one
    return [found[drafts][1] for drafts in sorted(found)]


def _sglang(servers: Servers, side: Side, point: Point) -> RoleKeys:
    keys: Keys = {"mem_fraction_static": side.fraction}
    if side.requests:
        keys["max_running_requests"] = _requests(servers, side, point)
    if servers.role == "prefill":
        if side.step:
            keys["chunked_prefill_size"] = side.step
        if side.prefill:
            keys["max_prefill_tokens"] = side.prefill
        if side.pool:
            keys["num_blocks"] = side.pool // _PAGE_TOKENS
    elif side.captured:
        keys["cuda_graph_max_bs"] = side.captured
    engine: Keys = {}
    if side.exchange and servers.expert_parallel > servers.tensor_parallel:
        engine["all2all"] = side.exchange
        if side.copies:  # no file gives expert loads (init-expert-location) to place them by
            engine |= {"redundant_experts": side.copies, "eplb_algorithm": "trivial"}
        if side.overlap:
            engine["overlap"] = side.overlap
    latency: Keys = {}
    if side.deepgemm == "off" and point.precision == "fp8":
        latency["fp8_block_products"] = "flashinfer"
    return RoleKeys(keys, engine, latency)


def _tensorrt_llm(servers: Servers, side: Side, point: Point) -> RoleKeys:
    keys: Keys = {
        "max_batch_size": _requests(servers, side, point),
        "max_num_tokens": max(side.step, _requests(servers, side, point), _STEP_TOKENS),
        "free_gpu_memory_fraction": side.fraction,
    }
    engine: Keys = {}
    if servers.role == "prefill":
        keys["disable_overlap_scheduler"] = True
        engine |= random_experts(servers, point, is_split=side.dp > side.ep)
    else:
        keys["cuda_graph_max_batch_size"] = side.captured
    if side.dp > 1 and _exchanges(side, point):
        engine["all2all"] = "mnnvl"
        if side.copies:
            engine["redundant_experts"] = side.copies
    if side.experts == _GATHERING and point.precision == "fp8":
        engine["version"] = _DEEPGEMM_VERSION
    return RoleKeys(keys, engine, {})


def random_experts(servers: Servers, point: Point, *, is_split: bool = False) -> Keys:
    """What prompts of random ids do to ranks of attention; `is_split`: each has a part of each
    expert."""
    is_spread = servers.data_parallel > 1 and servers.expert_parallel > servers.tensor_parallel
    if not point.is_random_text or not is_spread:
        return {}
    return {"expert_popularity": _SPLIT_EXPERTS if is_split else _RANDOM_EXPERTS}


def _requests(servers: Servers, side: Side, point: Point) -> int:
    """Requests of a rank: the file's, or all clients where it is for another number of servers."""
    if servers.role == "prefill" or servers.count == side.count:
        return side.requests
    return max(side.requests, math.ceil(point.clients / servers.count / servers.data_parallel))


def _exchanges(side: Side, point: Point) -> bool:
    """Ranks of attention reach whole experts over NVLink."""
    is_rack = point.gpu.startswith(_RACKS)
    if side.ep != side.dp * side.tp or side.experts == _GATHERING or point.gpu.startswith("H"):
        return False
    if point.measured_on < _ALWAYS_SINCE:
        return is_rack and side.ep > _EXPERTS_OF_TOKEN
    return is_rack or side.ep <= _MACHINE_GPUS


@functools.cache
def _launches() -> tuple[Launch, ...]:
    with _FILE.open(newline="", encoding="utf-8") as file:
        return tuple(_launch(row) for row in csv.DictReader(file))


def _launch(row: Mapping[str, str]) -> Launch:
    return Launch(
        engine=row["engine"],
        gpu=row["gpu"],
        precision=row["precision"],
        prompt=int(row["prompt"]),
        output=int(row["output"]),
        drafts=int(row["drafts"] or 0),
        clients=tuple(map(int, row["clients"].split())),
        since=row["since"],
        until=row["until"],
        prefill=_side(row, "p_"),
        decode=_side(row, "d_"),
    )


def _side(row: Mapping[str, str], prefix: str) -> Side:
    """Columns that a role lacks have no value in any file."""

    def whole(name: str) -> int:
        return int(row.get(prefix + name, "") or 0)

    return Side(
        count=whole("count"),
        tp=whole("tp"),
        dp=whole("dp"),
        ep=whole("ep"),
        requests=whole("requests"),
        step=whole("step"),
        prefill=whole("prefill"),
        pool=whole("pool"),
        fraction=float(row[prefix + "fraction"]),
        captured=whole("captured"),
        exchange=row.get(prefix + "exchange", ""),
        copies=whole("copies"),
        overlap=row.get(prefix + "overlap", ""),
        deepgemm=row.get(prefix + "deepgemm", ""),
        interval=whole("interval") or 1,
        experts=row[prefix + "experts"],
    )
