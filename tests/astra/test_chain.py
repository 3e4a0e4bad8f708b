"""The short cut for chains against the executor, to the cycle."""

import numpy as np
import pytest

from emu.backends.astra.backend import AstraBackend
from emu.backends.astra.chain import Chain
from emu.backends.astra.graph import Location, Place
from emu.backends.astra.iteration import run_once
from emu.backends.astra.memories import Memories, Memory
from emu.backends.astra.rows import Placement
from emu.latency.base import BatchShape, next_decode_shape
from emu.latency.moe_gate import GateShape, make_gate
from emu.network.dimensions import NetworkDim
from emu.network.rounds import CollectiveSystem
from tests.astra.test_convert import LLAMA, QWEN, generator

TOPOLOGIES = ("Ring", "FullyConnected", "Switch")


def drawn_shape(rng):
    decodes = int(rng.integers(0, 40))
    prompts = rng.integers(1, 900, int(rng.integers(0 if decodes else 1, 4))).tolist()
    low = int(rng.integers(1, 500))
    high = low + int(rng.integers(0, 900)) * (decodes > 1)
    middle = int(rng.integers(low, high + 1)) * max(0, decodes - 2)
    return BatchShape(
        prefill_new=prompts,
        prefill_context=rng.integers(0, 4000, len(prompts)).tolist(),
        decode_count=decodes,
        decode_context_sum=(low * (decodes > 0) + high * (decodes > 1) + middle),
        decode_context_max=high * (decodes > 0),
        decode_context_min=low * (decodes > 0),
        sequences=decodes + len(prompts),
        padded_tokens=int(rng.integers(0, 3)) * int(rng.integers(0, 2000)),
    )


@pytest.mark.parametrize("model", [LLAMA, QWEN], ids=["dense", "experts"])
@pytest.mark.parametrize("seed", range(8))
def test_a_chain_ends_when_the_executor_says(seed, model):
    rng = np.random.default_rng(seed)
    ranks = int(rng.choice([1, 2, 3, 4, 8] if model is LLAMA else [1, 2, 4, 8]))
    parallel = bool(model.experts and ranks > 1 and rng.integers(3))
    experts = {"expert": ranks, "local_experts": ranks} if parallel else {}
    dims = (
        NetworkDim(
            npus=ranks,
            topology=str(rng.choice(TOPOLOGIES)),
            gib_per_s=float(rng.uniform(1, 400)),
            latency_ns=float(rng.integers(0, 30_000)),
        ),
    )
    names = ["ring", "direct", "oneDirect"]
    names += ["halvingDoubling"] if ranks in (2, 4, 8) else []
    algorithm = str(rng.choice(names))
    network = CollectiveSystem(
        dims=dims, algorithms=(algorithm,), local_mem_gbytes_per_s=float(rng.uniform(100, 3000))
    )
    # A slow host memory keeps the ranks apart, a fast one does not.
    memories = Memories(
        remote=Memory(
            memory_type=str(rng.choice(["PER_NODE_MEMORY_EXPANSION", "PER_NPU_MEMORY_EXPANSION"])),
            gbytes_per_s=float(rng.choice([1, 20, 500])),
            latency_ns=float(rng.integers(0, 3000)),
        ),
        local=Memory(memory_type="PER_NPU_MEMORY_EXPANSION", gbytes_per_s=1597),
    )
    made = generator(model, tensor=ranks, **experts)
    gate = str(rng.choice(["balanced", "random", "skewed"]))
    made.times.expert_ns = lambda tokens, used, batch: 37 * tokens + 11 * used + batch
    if parallel:
        made.gate = make_gate(gate, GateShape(model.experts, 8, ranks=ranks))
    backend = AstraBackend(made, network, memories)
    for _ in range(4):
        shape = drawn_shape(rng)
        ends = run_once(network, memories, backend.graphs(shape))
        assert backend.iteration_ns(shape) == max(ends.values())
        if shape.decode_count:
            decode = next_decode_shape(shape, 0)
            steps = [backend.iteration_ns(next_decode_shape(decode, i)) for i in range(5)]
            assert backend.decode_run_ns(decode, 5).tolist() == np.cumsum(steps).tolist()


def test_what_is_no_chain_is_executed():
    network = CollectiveSystem(dims=(NetworkDim(npus=2, gib_per_s=16.0, latency_ns=500),))
    fits = [
        Chain.fits(generator(LLAMA, tensor=2), network),
        Chain.fits(generator(LLAMA, tensor=1, pipeline=2), network),
        Chain.fits(generator(QWEN, tensor=2, expert=4, local_experts=2), network),
        Chain.fits(
            generator(LLAMA, placement=Placement(default=Place(Location.REMOTE, 0))), network
        ),
    ]
    assert fits == [True, False, False, False]
