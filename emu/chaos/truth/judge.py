"""All of the truth on one run: what is wrong with it, as far as its records tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from emu.chaos.truth.choices import Choices
from emu.chaos.truth.figures import Figures
from emu.chaos.truth.iterations import Iterations
from emu.chaos.truth.policies import Policies
from emu.chaos.truth.tape import Record, Seat, Tape
from emu.chaos.truth.transfers import Transfers
from emu.chaos.truth.windows import Windows
from emu.config.schema import Config

if TYPE_CHECKING:
    from emu.cluster.plan import Plan


def truth_of(
    config: Config,
    plan: Plan,
    records: Sequence[Record],
    rows: Sequence[Mapping[str, str]] | None = None,
    summary: Mapping[str, Any] | None = None,
) -> list[str]:
    """One line for everything in a complete, stepped run that should have been otherwise.

    `rows` of requests.csv and the `summary` are judged if they are given.
    """
    tape = Tape(config, seats_of(plan), records)
    windows = Windows(tape)
    windows.judge()
    Iterations(tape, windows).judge()
    Transfers(tape, windows).judge()
    Choices(tape).judge()
    Policies(tape).judge()
    if rows is not None and summary is not None:
        Figures(tape).judge(rows, summary)
    return tape.problems


def seats_of(plan: Plan) -> list[Seat]:
    """Where replicas are and what they have, without anything that the engine computes."""
    return [
        Seat(
            replica=replica.replica_id,
            role=replica.role,
            gpus=replica.gpus,
            machine=replica.machine,
            tensor_parallel=replica.tensor_parallel,
            stages=replica.pipeline_parallel,
            blocks=replica.num_blocks,
            layers=replica.model.layers,
            kv_token_bytes=replica.kv_bytes_per_token,
            max_tokens=replica.max_model_tokens,
            latency=replica.latency,
            scheduler=replica.scheduler,
            group=replica.data_parallel_group,
            is_plain=replica.speculation is None
            and not replica.has_adapters
            and replica.model.tower is None
            and replica.images is None
            and replica.placement is None,
            is_hybrid=replica.kv_layout is not None,
            is_ahead=replica.schedules_ahead,
        )
        for replica in plan.replicas
    ]
