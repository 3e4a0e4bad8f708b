"""The executor: slots, queues, messages, collectives, and the captured session of the program."""

import pytest

from emu.backends.astra.executor import Executor
from emu.backends.astra.graph import Graph, Location, Node, NodeKind, Place
from emu.backends.astra.iteration import run_once
from emu.backends.astra.memories import Memories, Memory
from emu.backends.astra.polling import Answer, Polling
from emu.errors import Deadlock, InputError, RunError
from emu.network.dimensions import NetworkDim
from emu.network.rounds import CollectiveSystem

HOST = Memory(memory_type="PER_NODE_MEMORY_EXPANSION", gbytes_per_s=256.7, pim_channels=4)
MEMORIES = Memories(
    remote=HOST,
    cxl=Memory(memory_type="MEMORY_POOL", gbytes_per_s=60, latency_ns=250, devices=2),
    local=Memory(memory_type="PER_NPU_MEMORY_EXPANSION", gbytes_per_s=1597),
)
REMOTE = Place(Location.REMOTE, 0)


def network(*npus):
    dims = tuple(NetworkDim(npus=n, gib_per_s=16.0, latency_ns=20_000.0) for n in npus)
    return CollectiveSystem(dims=dims, local_mem_gbytes_per_s=1597)


def comp(i, ns, *deps):
    return Node(i, NodeKind.COMP, deps=deps, duration_ns=ns)


def load(i, size, *deps, place=REMOTE):
    return Node(i, NodeKind.MEM_LOAD, deps=deps, size_bytes=size, place=place)


def coll(i, size, *deps, kind=0, involved=None):
    return Node(i, NodeKind.COLL, deps=deps, size_bytes=size, collective=kind, involved=involved)


def end(*nodes, npus=1):
    return run_once(network(npus), MEMORIES, [Graph(0, list(nodes))])[0]


def test_compute_nodes_share_one_slot_in_order_of_id():
    assert end(comp(0, 10), comp(1, 20), comp(2, 5, 0)) == 35
    # A zero duration takes no event but still orders.
    assert end(comp(0, 0), comp(1, 7, 0)) == 7


def test_ready_nodes_start_lowest_id_first():
    # 1 ends at 10; then 2 and 3 are ready and 2 goes first, the load behind 3 starts at 40.
    assert end(comp(1, 10), comp(3, 20, 1), comp(2, 10, 1), load(4, 256, 3)) == 41


def test_memory_accesses_queue_per_device_and_overlap_compute():
    assert end(load(0, 2560), load(1, 2560), comp(2, 15)) == 20
    assert end(load(0, 2560), load(1, 600, place=Place(Location.CXL, 0))) == 260
    cxl = [load(i, 600, place=Place(Location.CXL, i % 2)) for i in range(4)]
    assert end(*cxl) == 520
    # An NPU's own memory has no queue: any number at a time.
    local = Place(Location.LOCAL)
    assert end(*(load(i, 15_970, place=local) for i in range(3))) == 10


def test_pim_channels_run_in_parallel_and_serve_in_order():
    def piece(i, channel):
        place = Place(Location.REMOTE, 0, channel)
        return Node(i, NodeKind.PIM_COMP, duration_ns=100, size_bytes=512, place=place)

    assert end(piece(0, 0), piece(1, 1), piece(2, 0)) == 204


def test_send_holds_the_slot_until_arrival_and_receive_ends_then():
    send = Node(0, NodeKind.SEND, size_bytes=8192, source=0, destination=1, tag=5)
    recv = Node(0, NodeKind.RECV, size_bytes=8192, source=0, destination=1, tag=5)
    ends = run_once(
        network(2), MEMORIES, [Graph(0, [send, comp(1, 7, 0)]), Graph(1, [recv, comp(1, 1, 0)])]
    )
    assert ends == {0: 20_476 + 7, 1: 20_476 + 1}
    late = msg_late = [comp(0, 50_000), Node(1, NodeKind.RECV, "", (0,), 0, 8192)]
    late[1].source, late[1].destination, late[1].tag = 0, 1, 5
    ends = run_once(network(2), MEMORIES, [Graph(0, [send]), Graph(1, msg_late)])
    assert ends == {0: 20_476, 1: 50_000}


def test_wrong_sizes_never_meet_and_are_reported():
    send = Node(0, NodeKind.SEND, size_bytes=8, source=0, destination=1)
    recv = Node(0, NodeKind.RECV, "wait", size_bytes=9, source=0, destination=1)
    with pytest.raises(RunError, match="NPU 1: 1 nodes left; last posted: RECV wait"):
        run_once(network(2), MEMORIES, [Graph(0, [send]), Graph(1, [recv])])


def test_collectives_meet_by_number_and_keep_the_stagger():
    graphs = [
        Graph(0, [comp(0, 1_000), coll(1, 4096, 0)]),
        Graph(1, [comp(0, 31_000), coll(1, 4096, 0)]),
    ]
    assert run_once(network(2), MEMORIES, graphs) == {0: 51_152, 1: 71_271}


def test_collectives_of_a_dimension_stay_inside_it():
    graphs = [Graph(i, [coll(0, 4096, involved=(True, False))]) for i in range(4)]
    assert set(run_once(network(2, 2), MEMORIES, graphs).values()) == {40_271}


def test_disagreeing_or_empty_collectives_are_errors():
    graphs = [Graph(0, [coll(0, 4096)]), Graph(1, [coll(0, 64)])]
    with pytest.raises(RunError, match="disagree on their collective number 0"):
        run_once(network(2), MEMORIES, graphs)
    with pytest.raises(RunError, match="would never complete"):
        run_once(network(2, 1), MEMORIES, [Graph(0, [coll(0, 64, involved=(False, True))])])


def test_missing_memory_is_an_error():
    with pytest.raises(RunError, match="lies in cxl_mem, which does not exist"):
        run_once(
            network(1), Memories(remote=HOST), [Graph(0, [load(0, 1, place=Place(Location.CXL))])]
        )
    with pytest.raises(InputError, match="at least 1 GB/s"):
        Memories(remote=Memory(memory_type="MEMORY_POOL", gbytes_per_s=0.5)).check()


def test_a_queued_graph_starts_when_the_one_before_ends():
    executor = Executor(network(1), MEMORIES)
    executor.load(Graph(0, [comp(0, 10)]))
    executor.load(Graph(0, [comp(0, 5)]))
    executor.run()
    assert executor.now_ns == 15
    assert executor.is_idle(0)
    assert executor.compute_ns(0) == 15


class Script:
    """Answers from a list of (npu, iteration, now, answer)."""

    def __init__(self, lines):
        self.lines = list(lines)
        self.seen = []

    def answer(self, npu, iteration, now_ns):
        self.seen.append((npu, iteration, now_ns))
        return self.lines[len(self.seen) - 1]

    def next_ns(self, now_ns):
        return -1


def test_the_captured_session_of_the_program():
    def work(npu):
        return Graph(
            npu,
            [
                load(0, 2560),
                comp(1, 1000, 0),
                coll(2, 4096, 1),
                comp(3, 2000, 2),
                Node(4, NodeKind.MEM_STORE, deps=(3,), size_bytes=5120, place=REMOTE),
            ],
        )

    executor = Executor(network(2), MEMORIES)
    polling = Polling(executor, starts=[0], ends=[1])
    graphs = {0: work(0), 1: work(1)}
    passing = Answer.PASS
    script = Script([passing, graphs, graphs, passing, passing, Answer.DONE, Answer.EXIT])
    first = [Graph(npu, [comp(0, 5000)]) for npu in range(2)]
    assert polling.run(script, first) == 1_048_321
    assert script.seen == [
        (1, 0, 5000),
        (0, 0, 5000),
        (1, 0, 5010),
        (0, 1, 48_301),
        (1, 1, 48_321),
        (0, 1, 48_321),
        (1, 1, 1_048_321),
    ]


def test_managed_npus_get_the_start_npus_graphs():
    executor = Executor(network(3), MEMORIES)
    polling = Polling(executor, starts=[0], ends=[2])
    graphs = {npu: Graph(npu, [comp(0, 10)]) for npu in range(3)}
    script = Script([Answer.PASS, graphs, graphs, Answer.PASS, Answer.EXIT])
    polling.run(script, [Graph(npu, [comp(0, 5)]) for npu in range(3)])
    assert executor.compute_ns(1) == 15
    # The end NPU is asked first, gets its graph at the next event.
    assert script.seen == [(2, 0, 5), (0, 0, 5), (2, 0, 15), (0, 1, 15), (2, 1, 25)]


def test_without_the_idle_grid_a_stuck_run_is_a_deadlock():
    executor = Executor(network(1), MEMORIES)
    polling = Polling(executor, starts=[0], ends=[], idle_step_ns=0)
    with pytest.raises(Deadlock, match="nothing can ever happen again"):
        polling.run(Script([Answer.PASS] * 3), [Graph(0, [comp(0, 5)])])
