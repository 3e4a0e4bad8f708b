"""What a step takes with the roofline: all its kernels, and what the engine does between them.

Restates docs/lab/roofline.md. A step is the sum of its kernels at the token count of its graph,
attention over what each member has read before, logits of its rows; the host bounds it, or comes
on top. Models whose layers differ are those of `unlike_layers`. Not restated, and passed over:
experts that are exchanged or routed unevenly, weights and attention outside the GPU, engines that
are corrected or fresh, and the delta rule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final

import msgspec

from emu.apps.chaos.truth.graphs import Graphs
from emu.apps.chaos.truth.kernel_times import Attention, Operations, Peers, stored
from emu.apps.chaos.truth.rings import Rings
from emu.apps.chaos.truth.steps import Step
from emu.catalogue.layers import Experts, LatentAttention
from emu.config.schema import NetworkTable, RooflineTable
from emu.latency.coefficients import scaled
from emu.latency.context import LatencyContext

_WIDE: Final = ("float16", "bfloat16", "float32")


def is_restated(context: LatencyContext) -> bool:
    """Whether all that the steps of such a replica take is here."""
    table, model, engine = context.table, context.model, context.engine
    if type(table) is not RooflineTable or model.wide_router:
        return False
    if any(one.state and one.state.kind == "gated_delta" for one in model.special_layers):
        return False
    is_elsewhere = context.shared_experts or context.placement or table.attention_offload
    is_odd = is_elsewhere or model.tower or table.fp8_block_products != "native"
    is_fresh = not table.warm_up or (engine is not None and engine.is_corrected)
    is_routed = model.experts is not None and table.expert_routing != "balanced"
    return not (is_odd or is_fresh or is_routed)


class StepTimes:
    """One kind of replica, which `is_restated`."""

    def __init__(self, context: LatencyContext) -> None:
        self._context, self._spec = context, context.model
        self._tp, self._ep = context.tensor_parallel, context.expert_parallel or 1
        self._set_types(context)
        gpu, node, table = context.gpu, context.node, context.table
        assert isinstance(table, RooflineTable)
        kernels = context.kernels.coefficients(gpu)
        kernels = scaled(kernels, table.compute_efficiency, table.memory_efficiency)
        self._kernels = msgspec.structs.replace(
            kernels,
            marlin=table.mxfp4_experts == "marlin",
            cutlass=table.nvfp4_experts == "cutlass",
        )
        self._ops = Operations(gpu, self._kernels, self._element)
        self._rings = Rings(context)
        nvlink = gpu.nvlink_gbps if node.nvlink_gbps < 0 else node.nvlink_gbps
        pcie = gpu.pcie_gbps if node.pcie_gbps <= 0 else node.pcie_gbps
        peers = Peers(gpu, self._kernels, nvlink, pcie)
        self._peers: Peers | Rings = self._rings if _is_described(context) else peers
        self._graphs = Graphs(context)
        self._attention = self._attention_of_layer()
        self._layer_ns: dict[tuple[int, bool, frozenset[str]], float] = {}

    def _set_types(self, context: LatencyContext) -> None:
        spec, dtype = context.model, context.dtype
        is_given = dtype != "auto"
        self._plain = dtype if dtype in _WIDE else spec.dtype
        self._linear = dtype if is_given else spec.linear_dtype or spec.dtype
        self._expert = dtype if is_given else spec.expert_dtype or spec.dtype
        self._kv = context.kv_cache_dtype
        if self._kv == "auto":
            self._kv = spec.published_kv_dtype or self._plain
        self._element = stored(1, self._plain)

    def _attention_of_layer(self) -> Attention:
        spec, ranks = self._spec, self._tp
        heads, kv_heads = -(-spec.heads // ranks), max(1, -(-spec.kv_heads // ranks))
        latent = spec.latent
        kept = kv_heads * 2 * spec.head_dim
        if latent is not None:
            kept = latent.kv_lora_rank + latent.qk_rope_head_dim
        return Attention(
            self._ops,
            heads,
            kv_heads,
            spec.head_dim,
            stored(kept, self._kv),
            latent,
            narrow=stored(1, self._kv) == 1,
        )

    # A step.
    def stages(self, step: Step) -> list[float]:
        """What it takes on each stage, ns; not a number where it is not restated."""
        tokens = self._graphs.tokens(step)
        spec, count = self._spec, self._context.pipeline_parallel
        sizes = [spec.layers // count] * count
        for at in range(spec.layers % count):
            sizes[-2 - at] += 1
        found: list[float] = []
        first = 0
        for stage, size in enumerate(sizes):
            took = self._layers(range(first, first + size), tokens, step)
            first += size
            if stage == 0:
                took += self._embedding(tokens)
            if stage < count - 1:
                took += 1e9 * self._rings.sent(self._stream(tokens))
            else:
                took += 1e9 * self._ops.moved(4 * self._stream(tokens))
                took += self._head(step.sequences + step.drafts)
            found.append(took)
        found[0] += self._graphs.step_ns
        least_ns, beside_ns = self._graphs.host_ns(step)
        found[0] = max(found[0], least_ns)  # a number that is none comes first, and stays
        found[-1] = max(found[-1] + beside_ns, 1.0)
        return found

    def leads_in(self, tokens: int, columns: int) -> float:
        """A product in front of the layers, ns."""
        return 1e9 * self._ops.product(tokens, columns, self._spec.hidden, self._plain)

    def _layers(self, layers: range, tokens: int, step: Step) -> float:
        spec, total = self._spec, 0.0
        kinds = Counter(
            (spec.is_moe_layer(at), spec.is_window_layer(at), spec.layer(at).unquantized)
            for at in layers
        )
        for (is_moe, is_window, wide), count in kinds.items():
            window = spec.window if is_window else 0
            total += count * (self._layer(tokens, is_moe, wide) + self._attends(step, window))
            if is_moe and step.mean:
                others = self._routed(step.mean, wide) - self._routed(tokens, wide)
                others += self._met(step.mean, is_padded=False) - self._met(tokens)
                total += 1e9 * count * others
        return total

    def _met(self, tokens: int, *, is_padded: bool = True) -> float:
        """The way of so many tokens of each member of a group to all experts, and back."""
        size, group = self._stream(tokens), self._ep // self._tp
        engine = self._context.engine
        if not is_padded and engine is not None and engine.sums_groups:
            return 2 * self._peers.summed(size * group, group)
        return self._peers.gathered(size, group) + self._peers.scattered(size * group, group)

    def _attends(self, step: Step, window: int) -> float:
        """Attention of one layer over what was there before."""
        kernels, attention = self._kernels, self._attention
        kernel = kernels.prompts if step.prompts else kernels.decodes
        total = 1e3 * kernel.launch_us
        if step.decodes:
            seen = min(step.seen, step.decodes * window) if window else step.seen
            if step.verifying:
                took = attention.verifies(step.decodes, step.queries, seen)
            else:
                took = attention.decodes(step.decodes, seen)
            total += 1e9 * took * (kernels.decodes.beside_prompts if step.prompts else 1.0)
        if step.prompts:
            total += 1e9 * attention.prompts(step.prompts, window)
        return total

    # What depends on the number of tokens alone.
    def _stream(self, tokens: int) -> int:
        return tokens * self._spec.hidden * self._element

    def _summed(self, size: int) -> float:
        return self._peers.summed(size, self._tp) if self._tp > 1 else 0.0

    def _layer(self, tokens: int, is_moe: bool, wide: frozenset[str]) -> float:
        known = self._layer_ns.get((tokens, is_moe, wide))
        if known is None:
            took = self._beside_products(tokens)
            took += self._projections(tokens, wide)
            if is_moe:
                took += self._experts(tokens, wide)
            else:
                took += self._mlp(tokens, self._spec.ffn, self._kept("mlp", wide))
            took += self._collectives(tokens, is_moe)
            known = self._layer_ns[tokens, is_moe, wide] = 1e9 * took
        return known

    def _kept(self, part: str, wide: frozenset[str]) -> str:
        """Type of a part of a layer, some of which a checkpoint leaves as they were."""
        return self._plain if part in wide else self._linear

    def _beside_products(self, tokens: int) -> float:
        """Norms and rotary."""
        spec, moved = self._spec, self._ops.moved
        heads = -(-spec.heads // self._tp) + max(1, -(-spec.kv_heads // self._tp))
        wide = tokens * heads * spec.head_dim * self._element
        total = 0.0
        if not self._is_fused(tokens):
            total += spec.norms_per_layer * moved(4 * self._stream(tokens))
        if spec.qk_norm:
            total += moved(2 * wide)
        if spec.wide_qk_norm:
            total += moved(wide) + moved(2 * wide)
        return total if spec.position_rows else total + moved(2 * wide)

    def _is_fused(self, tokens: int) -> bool:
        """Norms run in the kernels of the all-reduces before them."""
        context = self._context
        if context.engine is None:
            return False
        most = context.kernels.fused_bytes_max(context.gpu.architecture, self._tp)
        return self._stream(tokens) <= most

    def _projections(self, tokens: int, wide: frozenset[str]) -> float:
        spec, dtype = self._spec, self._kept("mixer", wide)
        heads, hidden = -(-spec.heads // self._tp), spec.hidden
        product: Callable[[int, int, int, str], float] = self._ops.product
        if spec.latent is None:
            kv_heads = max(1, -(-spec.kv_heads // self._tp))
            into = product(tokens, (heads + 2 * kv_heads) * spec.head_dim, hidden, dtype)
            return into + product(tokens, hidden, heads * spec.head_dim, dtype)
        kinds = dtype, self._kept("output", wide)
        return latent_products(spec.latent, heads, hidden, tokens, kinds, product)

    def _mlp(self, tokens: int, width: int, dtype: str, *, is_gated: bool | None = None) -> float:
        mine, hidden = -(-width // self._tp), self._spec.hidden
        into = 2 if (self._spec.gated_mlp if is_gated is None else is_gated) else 1
        total = self._ops.product(tokens, into * mine, hidden, dtype)
        total += self._ops.moved((into + 1) * tokens * mine * self._element)
        return total + self._ops.product(tokens, hidden, mine, dtype)

    def _experts(self, tokens: int, wide: frozenset[str]) -> float:
        """The router, routed experts of all that share them, and those that every token passes."""
        spec, moe = self._spec, self._spec.experts
        assert moe is not None
        total = self._ops.product(tokens, moe.count, spec.hidden, self._plain)
        total += self._routed(tokens, wide)
        return total if self._fuses_shared(wide) else total + self._shared(moe, tokens, wide)

    def _fuses_shared(self, wide: frozenset[str]) -> bool:
        context = self._context
        fuses = self._ep <= 1 and context.kernels.fuses_shared(self._spec, context.gpu.architecture)
        return fuses and len({"shared", "experts"} & wide) != 1

    def _routed(self, tokens: int, wide: frozenset[str]) -> float:
        spec, moe = self._spec, self._spec.experts
        assert moe is not None
        return self._ops.experts(
            tokens * max(1, self._ep // self._tp),
            count=moe.count,
            chosen=moe.per_token,
            hidden=spec.hidden,
            ffn=-(-moe.ffn // max(1, self._tp // self._ep)),
            matrices=3 if spec.gated_mlp else 2,
            dtype=self._plain if "experts" in wide else self._expert,
            ranks=self._ep,
            shared=moe.shared_ffn // moe.ffn if self._fuses_shared(wide) else 0,
        )

    def _shared(
        self, moe: Experts, tokens: int, wide: frozenset[str], *, is_gated: bool | None = None
    ) -> float:
        """What every token passes, and its own gate: a column, a sigmoid, a product, the sum."""
        if not moe.shared_ffn:
            return 0.0
        dtype = self._kept("shared", wide)
        total = self._mlp(tokens, moe.shared_ffn, dtype, is_gated=is_gated)
        if moe.shared_gate:
            stream = self._stream(tokens)
            total += self._ops.product(tokens, 1, self._spec.hidden, self._plain)
            total += self._ops.moved(0) + self._ops.moved(2 * stream) + self._ops.moved(3 * stream)
        return total

    def _collectives(self, tokens: int, is_moe: bool) -> float:
        stream = self._stream(tokens)
        total = self._summed(stream)
        if self._spec.wide_qk_norm:
            total += self._summed(max(16, tokens * 8))
        group = self._ep // self._tp
        if not (is_moe and group > 1):
            return total + self._summed(stream)
        return total + self._met(tokens)

    def _embedding(self, tokens: int) -> float:
        stream = self._stream(tokens)
        return 1e9 * (self._ops.moved(2 * stream) + self._summed(stream))

    def _head(self, rows: int) -> float:
        """Logits, gathered from all ranks, and a token from each row."""
        spec = self._spec
        columns = -(-spec.vocab // self._tp)
        took = self._ops.product(rows, columns, spec.hidden, self._plain)
        if self._tp > 1:
            took += self._peers.gathered(rows * columns * self._element, self._tp)
        sampler_ns = self._graphs.sampler_ns(rows)
        if sampler_ns is None:
            took += self._ops.moved(10 * rows * spec.vocab) + 9e-6 * self._kernels.element_us
        return 1e9 * took + (sampler_ns or 0.0)


def latent_products(
    latent: LatentAttention,
    heads: int,
    hidden: int,
    tokens: int,
    dtypes: tuple[str, str],
    product: Callable[[int, int, int, str], float],
) -> float:
    """Down to the latent vectors, up to the heads, and out; types of those and of the last."""
    dtype, last = dtypes
    key = latent.qk_nope_head_dim + latent.qk_rope_head_dim
    down = latent.kv_lora_rank + latent.qk_rope_head_dim + latent.q_lora_rank
    total = product(tokens, down, hidden, dtype)
    total += product(tokens, heads * key, latent.q_lora_rank or hidden, dtype)
    up = heads * (latent.qk_nope_head_dim + latent.v_head_dim)
    total += product(tokens, up, latent.kv_lora_rank, dtype)
    return total + product(tokens, hidden, heads * latent.v_head_dim, last)


def _is_described(context: LatencyContext) -> bool:
    """The configuration describes the network of ranks, or they are on several machines."""
    network = context.network
    given, plain = msgspec.structs.asdict(network), msgspec.structs.asdict(NetworkTable())
    ranks = max(1, context.tensor_parallel, context.expert_parallel) * context.pipeline_parallel
    keys = ("collective_algorithm", "collective_algorithms", "topology", "endpoint_delay_ns")
    is_given = any(given[key] != plain[key] for key in keys)
    is_given = is_given or network.collective_splits > 1 or bool(network.congestion)
    is_given = is_given or network.link_latency_ns >= 0 or context.node.nvlink_latency_ns >= 0
    return is_given or ranks > context.gpus_per_machine
