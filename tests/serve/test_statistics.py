"""What counts at which moment: an engine's own times begin behind its front end."""

from __future__ import annotations

import anyio

from emu.apps.serve.intake import Intake
from emu.apps.serve.statistics import Statistics
from emu.kernel.wallclock import WallKernel
from emu.request import Status
from emu.units import NS_PER_S
from tests.made import request_with


def test_a_queue_begins_where_the_engine_hears_of_the_request() -> None:
    """Latencies are the client's, the parts of them the engine's."""
    statistics = Statistics()
    lengths = {"prompt_tokens": 10, "output_tokens": 3, "max_output_tokens": 3}
    request = request_with(request_id=0, arrival_ns=NS_PER_S, **lengths)
    request.queued_ns, request.first_scheduled_ns = 3 * NS_PER_S, 7 * NS_PER_S
    request.first_token_ns, request.last_token_ns = 8 * NS_PER_S, 12 * NS_PER_S
    request.first_out_ns, request.last_out_ns = NS_PER_S, 2 * NS_PER_S
    request.generated_tokens, request.status = 3, Status.COMPLETED
    statistics.ended(request)
    assert statistics.queue.total == 4.0
    assert statistics.prefill.total == 1.0
    assert statistics.decode.total == 4.0
    assert statistics.inference.total == 5.0
    assert statistics.e2e.total == 13.0
    assert list(statistics.recent) == [(8.0, 2.0, 13.0)]


def test_a_call_is_stamped_with_the_time_at_which_its_bytes_came() -> None:
    async def main() -> None:
        now_ns = [5_000_000_000]
        intake = Intake(WallKernel(speed=2.0, clock_ns=lambda: now_ns[0]))
        origin_ns = intake.kernel.wall_ns()
        now_ns[0] += 1_000_000_000
        assert intake.begin(400_000_000).at_ns == origin_ns + 1_200_000_000
        assert intake.begin(0).at_ns == origin_ns + 2_000_000_000

    anyio.run(main)
