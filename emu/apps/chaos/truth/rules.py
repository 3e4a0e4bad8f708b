"""The rules of the truth, by name: what `emu chaos` counts, so that none goes unasked.

A rule that judged nothing in a campaign has proved nothing: the campaign names it, and is red.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

RULES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "strike": "a fault strikes when it was asked for",
        "fault_end": "a fault is over when its duration is",
        "pause_end": "a replica that stands still goes on, or is given up",
        "lease": "KV waits no longer than its lease",
        "drain_grace": "a replica that drains forms no batch after its grace",
        "calm": "after all faults and deadlines nothing is lost",
        "link_rate": "a link has the rate that is configured, times the faults in force",
        "parts": "the parts of a transfer are its bytes",
        "hidden_bytes": "layer-wise transfers hide all layers but the last, and wait for them",
        "ends_of_route": "a transfer begins and ends at the links of its replicas",
        "arrival_of_bytes": "bytes arrive when the fluid model says",
        "never_ends": "a transfer ends",
        "recall_bytes": "a tier gives whole blocks of what is recalled",
        "kv_bytes": "KV that moves is that of its requests, in whole blocks",
        "weight_bytes": "weights that arrive are those that equal replicas load",
        "nic_route": "KV takes PCIe before the card where the card hangs behind it",
        "route": "transfers go over NVLink, PCIe or NICs as their ends stand",
        "sender": "weights come from replicas that may send them",
        "layers": "an iteration runs all layers, after it was formed",
        "stage_order": "stages are first in, first out",
        "layer_order": "layers that run alone follow each other and take their time",
        "linear_cost": "an iteration takes its linear cost",
        "equal_batches": "equal batches take equally long",
        "roofline_bound": "an iteration takes what memory and arithmetic allow",
        "wave_start": "a wave leaves when its last member is there",
        "wave_members": "a wave has all members that serve",
        "budget": "a batch keeps its budgets and places",
        "sglang_rounds": "SGLang's batches are prompts or decodes, within limits",
        "cut": "a prompt is cut only for want of budget",
        "progress": "tokens are computed one after the other",
        "prefix_hit": "a prefix hit ends with a block",
        "order": "requests are admitted in the order of the queue",
        "watermark": "what begins leaves the watermark of blocks free",
        "front": "what was preempted goes on first",
        "take_part": "all that runs takes part in each batch",
        "victims": "the request admitted last is preempted first",
        "formed": "batches of vLLM and TensorRT-LLM are those that their rules form",
        "fair": "the tenant served least goes first",
        "turns": "round robin takes turns",
        "least_loaded": "the replica with the least to do gets the request",
        "handover": "KV goes to the decode replica of the policy",
        "kv_rejection": "the hot replicas are rejected, one stays open",
        "hot_is_closed": "a hot replica is open only while KV is on its way there",
        "rebalancing": "a move goes from the fuller to the emptier replica",
        "return": "a dead replica is back on time",
        "load_time": "loads begin after the cold start and end before their deadline",
        "retries": "refused clients ask again after pauses that double",
        "live_move": "a request gets a token between two moves",
        "host_copy": "weights come from memory while a machine has them",
        "plan": "planners follow their equations",
        "spare": "spares go when their time is up",
        "rows": "requests.csv says what the history says",
        "latencies": "latencies of the summary follow from the history",
        "counts": "counts of the summary follow from the history",
        "rates": "throughputs follow from the history",
        "objectives": "shares of objectives follow from the history",
        "gpu_time": "GPU time by role follows from the history",
        "moves": "bytes moved and migrations follow from the history",
        "orders": "orders of the planner follow from the history",
        "energy": "energy by part follows from iterations and transfers",
        "load": "energy of hosts follows from their load",
        "arithmetic": "model FLOPs follow from the tokens",
        "asked": "a row has the lengths and names that its line asked for",
        "deadline": "a request is due when its line says",
        "arrival": "a line arrives at its time",
        "turn": "a turn of a session arrives a pause after the one before",
        "patience": "a client leaves when its patience is over, and not before",
    }
)
"""What each demands, in a clause."""
