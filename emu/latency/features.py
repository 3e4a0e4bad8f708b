"""What features of an engine add to an iteration, on top of any backend: drafts, images, adapters.

Each is a backend around another one, on one stage, and takes its times from the GPU's figures
(`kernels.py`); none is measured. Pure.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from emu.catalogue import sizes
from emu.catalogue.lookup import GpuSpec
from emu.catalogue.model import ModelSpec
from emu.catalogue.sizes import Draft
from emu.latency.base import BatchShape, LatencyBackend, Verify, stepped_decode_run
from emu.latency.coefficients import Kernels
from emu.latency.kernels import AttentionCost, CollectiveNs, Ops
from emu.latency.roofline import LayerCosts, RooflineBackend
from emu.units import NS_PER_S, ceil_div

# --------------------------------------------------------------------------------------------------
# Speculative decoding: the target's step, then the drafter's passes.
#
# The target's backend costs the verification itself (`BatchShape.verify`). A drafter of layers
# passes first over all tokens of the step, because it keeps KV of its own for every token, and then
# k - 1 times over one token of each sequence that gets drafts, each pass with its rows of logits.
# N-grams are looked up on the host and cost what the configuration says. Launch gaps between passes
# are not modeled.


class DraftPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is fixed about drafting on one kind of replica."""

    tokens: int
    """Drafts of a sequence for each step."""
    step_ns: int
    """Of all drafting in a step; -1 = the passes of `passes`."""


class SpeculativeBackend:
    """Implements `LatencyBackend` for a replica that speculates, on one stage."""

    foreign = False
    monotone_decode = False

    def __init__(
        self, inner: LatencyBackend, plan: DraftPlan, passes: RooflinePasses | None = None
    ) -> None:
        """`passes` None: drafting costs `plan.step_ns`."""
        assert passes is not None or plan.step_ns >= 0
        self.inner = inner
        self.name = inner.name
        self.plan = plan
        self.first_use_ns = getattr(inner, "first_use_ns", ())
        self._passes = passes

    def draft_ns(self, shape: BatchShape) -> int:
        """Drafting after a step of this shape; 0 where the shape has no speculation."""
        verify = shape.verify
        if verify is None:
            return 0
        if self.plan.step_ns >= 0 or self._passes is None:
            return self.plan.step_ns if verify.drafting else 0
        total = self._passes.pass_ns(shape)
        if verify.drafting:
            for number in range(1, self.plan.tokens):
                total += self._passes.pass_ns(_one_token_each(verify, number))
        return total

    def iteration_ns(self, shape: BatchShape) -> int:
        """Verification, and drafting for the next step."""
        return self.inner.iteration_ns(shape) + self.draft_ns(shape)

    def stage_ns(self, shape: BatchShape) -> tuple[int, ...]:
        """The one stage."""
        return (self.iteration_ns(shape),)

    def decode_run_ns(self, shape: BatchShape, steps: int) -> NDArray[np.int64]:
        """Successive iterations without drafts, one by one."""
        return stepped_decode_run(self, shape, steps)

    def components_ns(self, shape: BatchShape) -> dict[str, int]:
        """The target's components, and `draft`."""
        return {**self.inner.components_ns(shape), "draft": self.draft_ns(shape)}


def _one_token_each(verify: Verify, number: int) -> BatchShape:
    """The drafter's pass `number` (from 0) after the first: a decode of each sequence."""
    count = verify.drafting
    context = verify.drafting_context_sum + count * number
    mean = context // count
    return BatchShape(
        decode_count=count,
        decode_context_sum=context,
        decode_context_max=mean,
        decode_context_min=mean,
        sequences=count,
    )


def uniform_step(count: int, context_tokens: int, drafts: int) -> BatchShape:
    """A step of `count` equal sequences; `drafts` 0 = plain decoding."""
    shape = BatchShape(sequences=count)
    if not drafts:
        shape.decode_count = count
        shape.decode_context_sum = count * context_tokens
        shape.decode_context_max = shape.decode_context_min = context_tokens
        return shape
    tokens = count * (1 + drafts)
    context = count * context_tokens
    shape.verify = Verify(count, tokens, context, count, context + tokens)
    return shape


def stops_paying_at(
    plain: LatencyBackend,
    speculative: LatencyBackend,
    drafts: int,
    tokens_per_step: float,
    context_tokens: int,
    batch_max: int,
) -> int:
    """The smallest batch in which decoding with drafts brings fewer tokens a second; 0 = none.

    `tokens_per_step`: mean tokens of a sequence in a step. Batches up to `batch_max` are looked at.
    """
    for count in range(1, batch_max + 1):
        plain_ns = plain.iteration_ns(uniform_step(count, context_tokens, 0))
        with_drafts_ns = speculative.iteration_ns(uniform_step(count, context_tokens, drafts))
        if with_drafts_ns > tokens_per_step * plain_ns:
            return count
    return 0


class RooflinePasses:
    """A drafter's pass by the roofline: its layers, the projection in front of them, its logits."""

    def __init__(self, draft: Draft, backend: RooflineBackend) -> None:
        """`backend`: the drafter's layers as a model of their own, kernels alone."""
        self._backend = backend
        hidden = draft.spec.hidden
        self._inputs = ceil_div(draft.input_params, hidden * draft.tensor_parallel)
        self._hidden = hidden

    def pass_ns(self, shape: BatchShape) -> int:
        """One pass over the tokens of a batch; logits of the last token of each sequence only."""
        own = BatchShape(
            shape.prefill_new,
            shape.prefill_context,
            shape.decode_count,
            shape.decode_context_sum,
            shape.decode_context_max,
            shape.decode_context_min,
            shape.sequences,
        )
        verify = own.verify = shape.verify
        if verify is not None:  # unlike the target, it needs no logits of the drafts
            own.sequences -= verify.tokens - verify.count
        total = self._backend.iteration_ns(own)
        if self._inputs:
            costs = self._backend.costs
            tokens = max(1, shape.new_tokens)
            seconds = costs.ops.gemm_s(tokens, self._inputs, self._hidden, costs.plain)
            total += round(seconds * NS_PER_S)
        return total


# --------------------------------------------------------------------------------------------------
# Images: a transformer over the patches of each image.
#
# Engines encode outside the decoder's graph, in the step whose chunk reaches an image: products
# over the patches of all images of the step, attention inside each image, a projection to the
# decoder's width. The host launches every kernel, so that a step takes at least its launches.


_KERNELS_PER_LAYER: Final = 10
"""Two norms, four products, rotary, attention, activation, the residuals."""


def embedding_bytes(model: ModelSpec) -> int:
    """Bytes of what the tower makes for one token of a prompt."""
    assert model.tower is not None
    element = sizes.weight_bytes(1, sizes.activation_dtype(model, "auto"))
    return model.tower.levels * model.hidden * element


class TowerCosts:
    """Time of a model's tower on one of `tp` ranks, over which its heads and widths are split."""

    def __init__(
        self,
        model: ModelSpec,
        gpu: GpuSpec,
        kernels: Kernels,
        collective_ns: CollectiveNs,
        tp: int,
        launch_ns: int,
    ) -> None:
        """`launch_ns`: the host's time for one kernel."""
        tower = model.tower
        assert tower is not None
        assert tower.patches_per_token
        spec = msgspec.structs.replace(
            model,
            special_layers=(),
            experts=None,
            moe_layers=(),
            latent=None,
            window_layers=(),
            unquantized=(),
            linear_dtype="",
            qk_norm=False,
            wide_qk_norm=False,
            norms_per_layer=2,
            gated_mlp=False,
            position_rows=1,
            hidden=tower.hidden,
            layers=tower.layers,
            heads=tower.heads,
            kv_heads=tower.heads,
            head_dim=tower.hidden // tower.heads,
            ffn=tower.ffn,
        )
        dtype = sizes.activation_dtype(model, "auto")
        self._ops = Ops(gpu, kernels, sizes.weight_bytes(1, dtype))
        self._layers = LayerCosts(spec, self._ops, collective_ns, tp, 1, "auto")
        self._attention = AttentionCost(spec, gpu, kernels.decodes, kernels.prompts, tp, dtype)
        self._launch_s = kernels.prompts.launch_us * 1e-6
        self._host_ns = tower.layers * _KERNELS_PER_LAYER * launch_ns
        self._width = ceil_div(model.hidden, tp)
        self._dtype = dtype
        self.tower = tower
        self._known: dict[tuple[int, ...], int] = {}

    def images_ns(self, image_tokens: Sequence[int]) -> int:
        """All images of a step, given by their tokens in the prompt."""
        key = tuple(image_tokens)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = max(self._host_ns, self._gpu_ns(key)) if key else 0
        return found

    def _gpu_ns(self, image_tokens: tuple[int, ...]) -> int:
        tower = self.tower
        tokens = sum(image_tokens)
        images = [count * tower.patches_per_token for count in image_tokens]
        layer_ns = sum(self._layers.layer(sum(images), False))
        seconds = tower.full_layers * (self._attention_s(images) + self._launch_s)
        if tower.full_layers < tower.layers:
            side = tower.window_patches
            windows = [min(side, left) for n in images for left in range(n, 0, -side)]
            windowed = tower.layers - tower.full_layers
            seconds += windowed * (self._attention_s(windows) + self._launch_s)
        inner = tower.patches_per_token * tower.hidden
        seconds += tower.levels * self._ops.gemm_s(tokens, self._width, inner, self._dtype)
        return tower.layers * layer_ns + round(seconds * NS_PER_S)

    def _attention_s(self, groups: Sequence[int]) -> float:
        """Every patch of a group attends to all of it: twice the pairs of a causal prompt."""
        return self._attention.prompt_s(list(groups), [(n - 1) // 2 for n in groups], 0)


class EncoderBackend:
    """Implements `LatencyBackend` for a replica that encodes images itself, on one stage."""

    foreign = False
    monotone_decode = False

    def __init__(self, inner: LatencyBackend, costs: TowerCosts) -> None:
        self.inner = inner
        self.name = inner.name
        self.first_use_ns = getattr(inner, "first_use_ns", ())
        self.costs = costs

    def encoder_ns(self, shape: BatchShape) -> int:
        """What the images of a batch take."""
        return self.costs.images_ns(shape.images)

    def iteration_ns(self, shape: BatchShape) -> int:
        """The images, then the iteration."""
        return self.inner.iteration_ns(shape) + self.costs.images_ns(shape.images)

    def stage_ns(self, shape: BatchShape) -> tuple[int, ...]:
        """The one stage."""
        return (self.iteration_ns(shape),)

    def decode_run_ns(self, shape: BatchShape, steps: int) -> NDArray[np.int64]:
        """Successive iterations without images, one by one."""
        return stepped_decode_run(self, shape, steps)

    def components_ns(self, shape: BatchShape) -> dict[str, int]:
        """The components without images, and `encoder`."""
        return {**self.inner.components_ns(shape), "encoder": self.encoder_ns(shape)}


class EncoderFleet:
    """Encoders on GPUs of their own, which requests pass before they are routed.

    Pure arithmetic on instants. The images of a request that are not kept yet are encoded together
    by the encoder that is free first; requests wait in order of arrival. Embeddings are kept for
    all replicas, the least recently used leaves. A request goes on when all of its embeddings have
    been sent over one link.
    """

    def __init__(
        self,
        costs: TowerCosts,
        encoders: int,
        *,
        cache_tokens: int,
        token_bytes: int,
        bytes_per_s: float,
        latency_ns: int,
    ) -> None:
        """`token_bytes`: of the embeddings of a token; `cache_tokens` 0 = all are kept."""
        self._costs = costs
        self._free_ns = [0] * encoders
        self._cache_tokens = cache_tokens
        self._token_s = token_bytes / bytes_per_s
        self._latency_ns = latency_ns
        self._kept: OrderedDict[int, tuple[int, int]] = OrderedDict()
        """When each image is (or was) encoded, and its tokens."""
        self._kept_tokens = 0
        self.encoded_images = self.encoded_tokens = self.hits = self.steps = 0
        self.busy_ns = 0

    def ready_ns(self, now_ns: int, images: Sequence[tuple[int, int, int]]) -> int:
        """When a request that comes now has its embeddings at any replica."""
        ready_ns, total = now_ns, 0
        missing: dict[int, int] = {}
        for image, _, tokens in images:
            total += tokens
            kept = self._kept.get(image)
            if kept is not None:
                self._kept.move_to_end(image)
                ready_ns = max(ready_ns, kept[0])
                self.hits += 1
            else:
                missing[image] = tokens
        if missing:
            at = self._free_ns.index(min(self._free_ns))
            took_ns = self._costs.images_ns(list(missing.values()))
            self._free_ns[at] = end_ns = max(now_ns, self._free_ns[at]) + took_ns
            ready_ns = max(ready_ns, end_ns)
            self.busy_ns += took_ns
            self.steps += 1
            for image, tokens in missing.items():
                self._keep(image, end_ns, tokens)
        return ready_ns + self._latency_ns + round(total * self._token_s * NS_PER_S)

    def _keep(self, image: int, end_ns: int, tokens: int) -> None:
        self.encoded_images += 1
        self.encoded_tokens += tokens
        self._kept[image] = (end_ns, tokens)
        self._kept_tokens += tokens
        while self._cache_tokens and self._kept_tokens > self._cache_tokens:
            _, (_, gone) = self._kept.popitem(last=False)
            self._kept_tokens -= gone


# --------------------------------------------------------------------------------------------------
# LoRA adapters: loads, and two thin products beside each matrix.
#
# Memory is taken at start for every slot, whatever is loaded: for each matrix `rank` x (inputs +
# outputs) at 16 bits. A step with adapted requests computes, for each matrix, rows times inputs x
# rank and rank x outputs; the weights of every adapter in the batch are read. Ranks below the
# greatest one compute as the greatest.


ADAPTER_BYTES = 2
"""Of one weight of an adapter."""


class LoraPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is fixed about adapters on one kind of replica."""

    rank: int
    host_ns: int
    """From host memory to the GPU, one adapter."""
    cold_ns: int
    """From the disk to host memory and to the GPU."""


def adapted_matrices(spec: ModelSpec, tp: int) -> list[tuple[int, int, int]]:
    """(inputs, outputs, how many of them in the model) of one rank's adapted matrices."""
    found: dict[tuple[int, int], int] = {}

    def add(inputs: int, outputs: int, count: int = 1) -> None:
        found[inputs, outputs] = found.get((inputs, outputs), 0) + count

    hidden = spec.hidden
    for index in range(spec.layers):
        layer = spec.layer(index)
        part = layer.attention
        assert part is not None, "adapters of attention without heads of its own"
        heads, kv_heads = ceil_div(part.heads, tp), max(1, ceil_div(part.kv_heads, tp))
        add(hidden, heads * part.head_dim)
        add(hidden, kv_heads * part.head_dim)
        add(hidden, kv_heads * part.value_dim)
        add(heads * part.value_dim, hidden)
        assert layer.mlp is not None, "adapters of experts"
        width = ceil_div(layer.mlp.width, tp)
        add(hidden, width, 2 if layer.mlp.gated else 1)
        add(width, hidden)
    return [(inputs, outputs, count) for (inputs, outputs), count in found.items()]


def slot_bytes(spec: ModelSpec, tp: int, rank: int) -> int:
    """Bytes of one slot on one rank."""
    weights = sum(count * (i + o) for i, o, count in adapted_matrices(spec, tp))
    return rank * weights * ADAPTER_BYTES


class LoraBackend:
    """Implements `LatencyBackend` for a replica with adapters, on one stage."""

    foreign = False
    monotone_decode = False

    def __init__(
        self,
        inner: LatencyBackend,
        plan: LoraPlan,
        ops: Ops,
        matrices: Sequence[tuple[int, int, int]],
    ) -> None:
        """`matrices`: as `adapted_matrices`."""
        self.inner = inner
        self.name = inner.name
        self.plan = plan
        self.first_use_ns = getattr(inner, "first_use_ns", ())
        self._ops = ops
        self._matrices = tuple(matrices)
        self._known: dict[tuple[int, int], int] = {}

    def lora_ns(self, shape: BatchShape) -> int:
        """Loads and products of the adapters of a batch."""
        lora = shape.lora
        if lora is None or not lora.adapters:
            return 0
        return (
            lora.cold_loads * self.plan.cold_ns
            + lora.host_loads * self.plan.host_ns
            + self._products_ns(lora.tokens, lora.adapters)
        )

    def _products_ns(self, tokens: int, adapters: int) -> int:
        found = self._known.get((tokens, adapters))
        if found is None:
            rank, ops, seconds = self.plan.rank, self._ops, 0.0
            for inputs, outputs, count in self._matrices:
                more_bytes = (adapters - 1) * rank * (inputs + outputs) * ADAPTER_BYTES
                seconds += count * (
                    ops.gemm_s(tokens, rank, inputs, "bfloat16")
                    + ops.gemm_s(tokens, outputs, rank, "bfloat16")
                    + more_bytes / ops.memory_rate
                )
            found = self._known[tokens, adapters] = round(seconds * NS_PER_S)
        return found

    def iteration_ns(self, shape: BatchShape) -> int:
        """The iteration without adapters, and what they add."""
        return self.inner.iteration_ns(shape) + self.lora_ns(shape)

    def stage_ns(self, shape: BatchShape) -> tuple[int, ...]:
        """The one stage."""
        return (self.iteration_ns(shape),)

    def decode_run_ns(self, shape: BatchShape, steps: int) -> NDArray[np.int64]:
        """Successive iterations without adapters, one by one."""
        return stepped_decode_run(self, shape, steps)

    def components_ns(self, shape: BatchShape) -> dict[str, int]:
        """The components without adapters, and `lora`."""
        return {**self.inner.components_ns(shape), "lora": self.lora_ns(shape)}
