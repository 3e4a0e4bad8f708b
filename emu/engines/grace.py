"""What calls from Python take beside a Grace CPU, whose cores run one thread slower than others."""

from __future__ import annotations

from typing import Final

import msgspec

from emu.catalogue.gpu import GpuSpec
from emu.latency.engine import EngineModel

_GPUS: Final = ("GB200", "GB300")
SGLANG_CALLS: Final = 1.6
"""Times as long (`EngineModel.grace_calls`). Fitted to DeepSeek-R1 on GB300, prefill apart on four
ranks, 1,024 tokens (7 rows, 4 to 32 clients: bias of TTFT -26 to -2 %), judged on GB200 and longer
prompts (9 rows: its median |error| falls from 13 to 8 %)."""
TENSORRT_LLM_CALLS: Final = 1.3
"""The same, where fewer of the calls are Python's own. Fitted to DeepSeek-R1 on GB200, prefill
apart on four ranks (5 rows, 3 to 48 clients: bias of TTFT -15 to +4 %), judged on GB300 (10 rows:
its median |error| falls from 9 to 8 %, of the three with 1,024 tokens and a place for each client
from 42 to 25)."""


def called_on(model: EngineModel, gpu: GpuSpec) -> EngineModel:
    """The model with what calls from Python take on the host of a GPU."""
    if not gpu.kind.startswith(_GPUS):
        return model
    times = model.grace_calls
    return msgspec.structs.replace(
        model,
        eager_call_ns=round(model.eager_call_ns * times),
        eager_latent_ns=round(model.eager_latent_ns * times),
        eager_experts_ns=round(model.eager_experts_ns * times),
        eager_state_ns=round(model.eager_state_ns * times),
        host_handoff_ns=round(model.host_handoff_ns * times),
    )
