"""An engine that runs eagerly: every kernel of every step is called by the host."""

from __future__ import annotations

import msgspec
import pytest

from emu.catalogue import lookup_model
from emu.cluster.backends import make_latency
from emu.cluster.plan import make_plan
from emu.config.load import config_from_text
from emu.engines.registry import engine_named
from emu.errors import InputError
from emu.latency.base import LatencyBackend
from emu.latency.eager import EagerCalls, eager_calls
from emu.latency.make_roofline import host_calls
from tests.latency.shapes import decodes

CONFIG = """\
[model]
name = "Llama-3.1-8B"
[[nodes]]
gpu = "{gpu}"
gpus = 1
[workload.synthetic]
requests = 1
"""


def backend(*overrides: str, gpu: str = "H100") -> LatencyBackend:
    config = config_from_text(CONFIG.format(gpu=gpu), "eager.toml", overrides=overrides)
    return make_latency(make_plan(config, "eager.toml").replicas[0].latency_context(config))


def test_calls_are_counted_by_kind_of_layer():
    """A dense layer: 2 norms, 4 of attention, 3 of the MLP; experts: gate, one module, 7 kernels."""
    assert eager_calls(lookup_model("Llama-3.1-8B"), 1) == (32 * 9, 0, 0, 0, 0)
    assert eager_calls(lookup_model("Llama-3.1-8B"), 2)[:2] == (32 * 11, 0), "two all-reduces"
    assert eager_calls(lookup_model("Mixtral-8x7B"), 1) == (32 * 8, 32 * 7, 0, 32, 0)
    assert eager_calls(lookup_model("Mixtral-8x7B"), 1, one_call=True).mixtures == 0
    assert eager_calls(lookup_model("Qwen3-8B"), 1).modules == 36 * 11, "norms of queries and keys"
    deepseek = eager_calls(lookup_model("DeepSeek-V3"), 1)
    assert deepseek.modules == 61 * (2 + 8) + 3 * 3 + 58 * (2 + 3)
    assert (deepseek.latent, deepseek.mixtures) == (61, 58)
    assert eager_calls(lookup_model("Qwen3-Next-80B-A3B"), 1).states == 36, "three layers of four"


def test_a_router_in_tensor_operations_calls_many():
    """Two rounds of 12 operations, and LayerNorms that leave the residual to a kernel of its own."""
    assert eager_calls(lookup_model("Phi-mini-MoE"), 1)[:2] == (32 * 8, 32 * (24 + 6 + 2))
    costs = {"eager_call_ns": 100, "launch_ns": 10, "eager_latent_ns": 7, "eager_experts_ns": 5}
    costs |= {"eager_state_ns": 3}
    model = msgspec.structs.replace(engine_named("vllm").model, **costs)
    assert EagerCalls(2, 3).host_ns(model) == 230
    assert EagerCalls(2, 3, latent=3, mixtures=1, states=2).host_ns(model) == 262


@pytest.mark.parametrize(
    ("model", "gpu", "calls"),
    [
        ("Qwen3-30B-A3B", "H200", False),
        ("gpt-oss-20b", "H200", True),  # mxfp4: Triton's
        ("DeepSeek-V3", "H200", True),  # a shared expert beside the others
        ("gpt-oss-20b", "B200", False),
    ],
)
def test_tensorrt_llms_experts_are_one_call_or_many(model: str, gpu: str, calls: bool) -> None:
    config = config_from_text(
        CONFIG.format(gpu=gpu).replace("Llama-3.1-8B", model).replace("gpus = 1", "gpus = 8"),
        "eager.toml",
        overrides=["engine.name=tensorrt-llm", "replicas.0.tensor_parallel=8"],
    )
    context = make_plan(config, "eager.toml").replicas[0].latency_context(config)
    assert context.engine is not None
    assert bool(host_calls(context, context.engine).mixtures) == calls


def test_an_eager_step_takes_the_hosts_calls_or_the_gpu():
    engine = engine_named("vllm").model
    eager, graphs = backend("latency.enforce_eager=true"), backend()
    host_ns = engine.host_step_ns + 8 * engine.host_sequence_ns + 32 * 9 * engine.eager_call_ns
    assert graphs.iteration_ns(decodes(8, 512)) < host_ns
    assert eager.iteration_ns(decodes(8, 512)) == host_ns
    slow = backend("latency.enforce_eager=true", gpu="L4")
    assert slow.iteration_ns(decodes(8, 512)) > host_ns, "the GPU takes longer"


def test_a_file_may_make_an_engine_eager_with_another_host(tmp_path):
    file = tmp_path / "slow_host.toml"
    file.write_text("enforce_eager = true\neager_call_ns = 160_000\n")
    slow = backend(f"engine.learned={file}").iteration_ns(decodes(8, 512))
    assert slow > 1.9 * backend("latency.enforce_eager=true").iteration_ns(decodes(8, 512))


@pytest.mark.parametrize("none", ["engine.name=none", "latency.host_overhead=false"])
def test_kernels_alone_are_launched_by_nothing(none):
    with pytest.raises(InputError, match=r"latency\.enforce_eager: needs an engine"):
        backend("latency.enforce_eager=true", none)


def test_other_backends_refuse_the_key():
    with pytest.raises(InputError, match=r'means nothing with backend = "linear"'):
        backend("latency.backend=linear", "latency.enforce_eager=true")
