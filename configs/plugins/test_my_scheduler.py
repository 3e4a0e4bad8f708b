"""A test of the example scheduler on the bench, as `docs/lab/testing.md` shows it."""

from my_scheduler import ShortestFirst

from emu.replica.states import ReplicaState
from emu.testing import Bench, own_scheduler, request


def test_the_shortest_prompt_is_read_first() -> None:
    scheduler = own_scheduler(ShortestFirst, blocks=100, max_num_batched_tokens=64)
    bench = Bench(ReplicaState.COLOCATED, scheduler)
    bench.submit(request(1, prompt=60, output=2), request(2, prompt=10, output=2))
    assert [one.request_id for one in bench.run()] == [2, 1]
    assert scheduler.recount() == []
