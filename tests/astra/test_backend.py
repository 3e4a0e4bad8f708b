"""The latency backend: against sums by hand, against the closed form, and with a program."""

import anyio
import numpy as np
import pytest

from emu.backends.astra.backend import STAGGER, AstraBackend
from emu.backends.astra.calculator import Calculator
from emu.backends.astra.counts import CountStore
from emu.backends.astra.inputs import InputSetup
from emu.backends.astra.layer_times import BundleTimes
from emu.backends.astra.memories import Memories, Memory
from emu.backends.astra.rows import TraceGenerator, TraceSetup
from emu.errors import InputError, RunError
from emu.latency.base import COMPONENTS, BatchShape
from emu.latency.profile.backend import ProfileBackend
from emu.latency.profile.bundle import read_bundle
from emu.latency.profile.rows import HostMemory, Parallel, ProfileModel
from emu.network.collectives import Collectives, collective_ns
from emu.network.dimensions import NetworkDim
from emu.network.rounds import CollectiveSystem
from tests.astra.test_convert import LLAMA, PREFILL, QWEN, generator
from tests.astra.test_process import program
from tests.patience import PATIENCE_S
from tests.shared_data import SHARED, needs_shared

MEMORIES = Memories(
    remote=Memory(memory_type="PER_NODE_MEMORY_EXPANSION", gbytes_per_s=256),
    local=Memory(memory_type="PER_NPU_MEMORY_EXPANSION", gbytes_per_s=1597),
)
DECODE = BatchShape(
    decode_count=3, decode_context_sum=600, decode_context_max=300, decode_context_min=100,
    sequences=3,
)  # fmt: skip


def network(*npus):
    dims = tuple(NetworkDim(npus=n, gib_per_s=16.0, latency_ns=20_000.0) for n in npus)
    return CollectiveSystem(dims=dims, local_mem_gbytes_per_s=1597)


def backend(model, dims, setup=None, **kw):
    return AstraBackend(generator(model, **(setup or {})), network(*dims), MEMORIES, **kw)


def test_one_gpu_by_hand():
    one = backend(LLAMA, [1])
    layers = 260 * 100 + 32 * 1_000
    assert one.iteration_ns(PREFILL) == 8 + layers + 8
    assert one.iteration_ns(DECODE) == layers
    assert one.stage_ns(DECODE) == (layers,)


def test_tensor_parallel_by_hand():
    two = backend(LLAMA, [2], {"tensor": 2})
    layers = 260 * 100 + 32 * 1_000
    # Input loads queue for the host memory: the second rank is 8 late and stays so.
    assert two.iteration_ns(PREFILL) == 8 + 8 + layers + 64 * 288_109 + 8
    reduce = collective_ns(network(2), "all-reduce", 3 * 4096 * 2)
    assert two.iteration_ns(DECODE) == layers + 64 * reduce


def test_pipeline_stages_add_up():
    four = backend(LLAMA, [1, 4], {"pipeline": 4})
    stages = four.stage_ns(PREFILL)
    assert len(stages) == 4
    assert sum(stages) == four.iteration_ns(PREFILL)
    hop = 264_140
    assert stages[0] == 8 + 100 + 8 * 1_800 + hop
    assert stages[1] == stages[2] == 8 * 1_800 + hop
    assert stages[3] == 8 * 1_800 + 300 + 8


def test_experts_of_a_group_are_simulated_together():
    setup = {"expert": 2, "local_experts": 1, "expert_dims": (False, True)}
    pair = backend(QWEN, [1, 2], setup, members=2)
    alone = backend(QWEN, [1], {"expert": 1})
    assert len(pair.graphs(PREFILL)) == 2
    exchange = 48 * (84_869 + 83_023)
    assert pair.iteration_ns(PREFILL) == alone.iteration_ns(PREFILL) + exchange + 8


def test_parts_of_the_layers_add_up_to_less_than_all():
    one = backend(LLAMA, [1])

    def cut(start, layers):
        return one.iteration_ns(
            BatchShape(
                prefill_new=[512],
                prefill_context=[0],
                sequences=1,
                start_layer=start,
                layers=layers,
            )
        )

    assert cut(0, 32) == one.iteration_ns(PREFILL)
    # The state that leaves layer 12 is written to the GPU's own memory, and read from there.
    state = int(512 * 4096 * 2 / 1597)
    assert cut(0, 12) == 8 + 100 + 12 * 1_800 + state
    assert cut(12, -1) == state + 20 * 1_800 + 300 + 8


@pytest.mark.parametrize("dims", [[1], [2], [1, 2]])
def test_components_add_up(dims):
    setup = {"tensor": 2} if dims == [2] else {"pipeline": 2} if len(dims) == 2 else {}
    one = backend(LLAMA, dims, setup, host_ns=lambda shape: 77)
    for shape in (PREFILL, DECODE):
        parts = one.components_ns(shape)
        assert set(parts) == set(COMPONENTS)
        assert sum(parts.values()) == one.iteration_ns(shape)
        assert min(parts.values()) >= 0
        assert parts["cpu_overhead"] == 77


def test_a_run_of_decodes_is_stepped():
    one = backend(LLAMA, [1])
    ends = one.decode_run_ns(DECODE, 3)
    assert np.array_equal(ends, np.cumsum([one.iteration_ns(DECODE)] * 3))


def test_quirks_by_name():
    two = {"tensor": 2}
    late = backend(LLAMA, [2], two, faithful=[STAGGER])
    assert late.iteration_ns(PREFILL) == backend(LLAMA, [2], two).iteration_ns(PREFILL)
    # Without a load to queue for, the last rank waits for the first event all the same.
    assert late.iteration_ns(DECODE) == backend(LLAMA, [2], two).iteration_ns(DECODE)
    with pytest.raises(InputError, match=r"faithful: unknown name 'idle'"):
        backend(LLAMA, [1], faithful=["idle"])


# --- against the closed form ----------------------------------------------------------------------

BUNDLE = SHARED / "profiles/RTXPRO6000/meta-llama/Llama-3.1-8B/bf16"
SHAPES = [
    PREFILL,
    DECODE,
    BatchShape(
        prefill_new=[300, 20], prefill_context=[0, 16], decode_count=4, decode_context_sum=9_000,
        decode_context_max=5_000, decode_context_min=17, sequences=6,
    ),
]  # fmt: skip


@needs_shared
@pytest.mark.parametrize("tp", [1, 2])
def test_the_profile_backend_is_the_same_sum(tp):
    bundle = read_bundle(BUNDLE, tp)
    system = network(tp)
    collectives = Collectives(system)

    def cost_ns(kind, size, ranks):
        return collectives.collective_ns(kind.replace("_", "-"), size, ranks)

    closed = ProfileBackend(
        bundle, ProfileModel(layers=32, hidden=4096), Parallel(tensor=tp),
        host_memory=HostMemory(gbytes_per_s=256), collective_ns=cost_ns,
    )  # fmt: skip
    setup = TraceSetup(model=LLAMA, tensor=tp)
    executed = AstraBackend(TraceGenerator(setup, BundleTimes(bundle)), system, MEMORIES)
    for shape in SHAPES:
        assert executed.iteration_ns(shape) == closed.iteration_ns(shape)


@needs_shared
def test_reference_values_of_an_iteration():
    bundle = read_bundle(BUNDLE, 2)
    setup = TraceSetup(model=LLAMA, tensor=2)
    two = AstraBackend(TraceGenerator(setup, BundleTimes(bundle)), network(2), MEMORIES)
    assert two.iteration_ns(PREFILL) == 31_723_586
    four = TraceSetup(model=LLAMA, tensor=2, pipeline=2, tensor_dims=(True, False))
    stages = AstraBackend(TraceGenerator(four, BundleTimes(bundle)), network(2, 2), MEMORIES)
    # In the published run the middle ranks start with the first one and do not queue behind it.
    assert stages.iteration_ns(PREFILL) - 31_987_718 in (0, 8)


# --- with a program -------------------------------------------------------------------------------


def process_backend(directory, store=None, mode="fork", npus=1):
    system = network(npus)
    setup = InputSetup(network=system, memories=MEMORIES)
    calculator = Calculator(program(directory, mode), setup, npus, timeout_s=PATIENCE_S)
    made = generator(LLAMA, tensor=npus)
    return AstraBackend(made, system, MEMORIES, calculator=calculator, store=store)


@pytest.mark.parametrize("npus", [1, 2])
def test_a_program_is_asked_once_for_each_shape(tmp_path, npus):
    path = tmp_path / "counts.sqlite"

    async def main():
        asked = process_backend(tmp_path, CountStore(path, "x"), npus=npus)
        assert asked.foreign
        first = [await asked.measure(shape) for shape in (PREFILL, DECODE, PREFILL)]
        await asked.aclose()
        return first

    first = anyio.run(main)
    assert first[0] == first[2] > 0
    replayed = AstraBackend(
        generator(LLAMA, tensor=npus), network(npus), MEMORIES,
        store=CountStore(path, "x", must_exist=True), replay_only=True,
    )  # fmt: skip
    assert not replayed.foreign
    assert [replayed.iteration_ns(shape) for shape in (PREFILL, DECODE)] == first[:2]
    with pytest.raises(RunError, match=r"no count for the batch p=7@0 d=- n=1"):
        replayed.iteration_ns(BatchShape(prefill_new=[7], prefill_context=[0], sequences=1))
    anyio.run(replayed.aclose)  # CPython 3.13 complains of a database that stays open


def test_a_program_that_dies_is_an_error_and_is_gone(tmp_path):
    async def main():
        asked = process_backend(tmp_path, mode="crash")
        try:
            await asked.measure(PREFILL)
        finally:
            await asked.aclose()

    with pytest.raises(RunError, match="ended in the middle of the run with status 7"):
        anyio.run(main)
