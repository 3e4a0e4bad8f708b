"""Everything of a measured iteration that follows from counts: all rows but attention.

Owns the cost of the layers for a number of tokens and of logit rows (with the collectives that
hang on them), of the exchange between expert ranks, and of the host-memory accesses at both ends
(LLMServingSim 2.0). Each count is worked out once and kept.

Does not know batches (`backend.py`), interpolation (`tables.py`), nor how long a collective takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, TypeAlias

import msgspec

from emu.errors import InputError
from emu.latency.moe_gate import Gate, Routing
from emu.latency.profile.bundle import Bundle
from emu.latency.profile.tables import Curve

CollectiveCost: TypeAlias = Callable[[str, int, int], int]
"""(kind, bytes, ranks) -> ns. Kinds: `all_reduce` (tensor parallel, after o_proj and down_proj;
bytes of the whole tensor), `all_gather` (expert dispatch; bytes of one rank's part),
`reduce_scatter` (expert combine; bytes of the whole tensor), `point_to_point` (hidden state to
the next pipeline stage; 2 ranks)."""

LAYER_COMPONENT: Final = {
    "embedding": "embedding",
    "layernorm": "norm",
    "final_layernorm": "norm",
    "qk_norm": "norm",
    "rotary_emb": "rotary",
    "lm_head": "lm_head",
    "sampler": "sampler",
    "moe": "moe",
}
"""The component of a layer of a bundle; layers not listed are dense."""

_REDUCED: Final = ("o_proj", "down_proj")
"""Layers whose output is summed over the tensor-parallel ranks."""


class ProfileModel(msgspec.Struct, frozen=True, kw_only=True):
    """What the sum needs to know of the model beside the bundle."""

    layers: int
    hidden: int
    element_bytes: int = 2
    experts: int = 0
    """0 = a dense model."""
    moe_layers: tuple[bool, ...] = ()
    """Which layers have experts; empty = all of them if `experts`, else none."""


class Parallel(msgspec.Struct, frozen=True, kw_only=True):
    """Parallel degrees of one replica; `expert` counts the ranks of its whole expert group."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1


class HostMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Where the first layer's input comes from and the last one's output goes to."""

    gbytes_per_s: float
    latency_ns: int = 0
    stores_output: bool = True
    """False on a prefill replica: its last output leaves with the KV over the network."""

    def access_ns(self, size_bytes: int) -> int:
        """One access, truncated to whole nanoseconds (1 GB/s = 1 byte/ns)."""
        return self.latency_ns + int(size_bytes / self.gbytes_per_s)


class TokenCosts(msgspec.Struct, frozen=True):
    """Costs in ns that follow from the token count alone."""

    load: int
    prologue: int
    block: int
    """One layer without attention and without its MLP, collectives included."""
    dense_mlp: int
    expert_mlp: int
    """Dispatch, experts of the slowest rank and combine; without the experts if the gate draws."""
    head: int
    """Token-wise rows of the head."""
    store: int
    hop: int
    """Hidden state to the next stage."""
    whole: int
    """All layers and stages once."""


def graph_tokens(tokens: int) -> int:
    """The count at which an engine runs the token-wise layers of a batch.

    vLLM pads a batch to the next size that a CUDA graph was captured for: 1, 2, 4, multiples of 8
    up to 256, then of 16 up to 512. Larger ones are not padded, but their products are made of
    tiles: profiled times are stairs, and between two of the profile's samples, 16 tokens apart,
    the upper one is right.
    """
    if tokens > 256:
        return -(-tokens // 16) * 16
    if tokens > 4:
        return -(-tokens // 8) * 8
    return 4 if tokens == 3 else tokens


class LayerRows:
    """Costs of one kind of replica, by token count and by rows of logits."""

    def __init__(
        self,
        bundle: Bundle,
        model: ProfileModel,
        parallel: Parallel,
        memory: HostMemory | None,
        collective_ns: CollectiveCost | None,
        gate: Gate | None,
        *,
        is_padded: bool = False,
        compiled_permille: int = 1000,
    ) -> None:
        """`is_padded`: token-wise rows run at `graph_tokens`, as an engine runs them.
        `compiled_permille`: what they take in a compiled model."""
        if model.experts:
            assert gate is not None
            if bundle.experts is None:
                problem = f"missing, but the model has {model.experts} experts"
                raise InputError(f"{bundle.directory}/tp1/moe.csv", None, "", problem)
        single = parallel.tensor == parallel.pipeline == parallel.expert == 1
        assert single or collective_ns is not None
        self.moe_before = _moe_before(model)
        self._bundle = bundle
        self._sections = bundle.architecture.sections
        self._model = model
        self._parallel = parallel
        self._memory = memory
        self._collective_ns = collective_ns
        self._gate = gate
        self._is_padded = is_padded
        self._permille = compiled_permille
        self._by_tokens: dict[int, TokenCosts] = {}
        self._by_logits: dict[int, int] = {}

    def of_tokens(self, tokens: int) -> TokenCosts:
        """Costs of an iteration of so many tokens."""
        return self._by_tokens.get(tokens) or self._work_out(tokens)

    def of_logits(self, rows: int) -> int:
        """lm_head and sampler for so many rows of logits."""
        known = self._by_logits.get(rows)
        if known is None:
            curves = self._bundle.per_sequence
            known = sum(
                curves[layer].at(rows) for layer in self._sections["head"] if layer in curves
            )
            self._by_logits[rows] = known
        return known

    def experts_ns(self, routing: Routing) -> int:
        """The slowest rank: the combination waits for it. A rank without tokens runs nothing."""
        assert self._bundle.experts is not None
        at = self._bundle.experts.at
        pairs = zip(routing.rank_tokens, routing.rank_experts, strict=True)
        return max((at(tokens, max(1, used)) for tokens, used in pairs if tokens), default=0)

    def exchange_ns(self, tokens: int) -> int:
        """Tokens and router scores to the expert ranks, and their combination afterwards."""
        ranks = self._parallel.expert
        if ranks == 1:
            return 0
        model = self._model
        width = (model.hidden + model.experts) * model.element_bytes
        gather = self._collective("all_gather", max(1, tokens // ranks) * width, ranks)
        return gather + self._collective("reduce_scatter", self._hidden_bytes(tokens), ranks)

    def add_rows(self, parts: dict[str, int], section: str, times: int, tokens: int) -> None:
        """Add a section's token-wise rows, `times` over, to their components."""
        tokens = self._run(tokens)
        for layer in self._sections[section]:
            curve = self._bundle.dense.get(layer)
            if curve is not None:
                parts[LAYER_COMPONENT.get(layer, "dense")] += times * self._compiled_ns(
                    curve, tokens
                )
                parts["collectives"] += times * self._all_reduce_ns(layer, tokens)

    def add_logits(self, parts: dict[str, int], rows: int) -> None:
        """Add lm_head and sampler to their components."""
        for layer in self._sections["head"]:
            curve = self._bundle.per_sequence.get(layer)
            if curve is not None:
                parts[LAYER_COMPONENT.get(layer, "dense")] += curve.at(rows)

    def one_by_one(
        self, tokens: int, logits: int, attention_ns: int, experts_ns: int
    ) -> list[tuple[str, int, int]]:
        """(name, layer or -1, ns) of every row of an iteration, in order, collectives included."""
        costs, dense = self.of_tokens(tokens), self._bundle.dense
        reduce_ns = self._all_reduce_ns
        tokens = self._run(tokens)
        after, mlp = self._sections["post_attn"], self._sections["mlp_dense"]

        def of(section: Iterable[str], layer: int) -> list[tuple[str, int, int]]:
            return [
                (name, layer, self._compiled_ns(dense[name], tokens) + reduce_ns(name, tokens))
                for name in section
                if name in dense
            ]

        rows = [("load", -1, costs.load), *of(self._sections["prologue"], -1)]
        for layer in range(self._model.layers):
            rows += of(self._sections["pre_attn"], layer)
            rows += [("attention", layer, attention_ns), *of(after, layer)]
            if self.moe_before[layer + 1] > self.moe_before[layer]:
                rows.append(("moe", layer, experts_ns))
            else:
                rows += of(mlp, layer)
        rows += of(self._sections["head"], -1)
        for name in self._sections["head"]:
            curve = self._bundle.per_sequence.get(name)
            if curve is not None:
                rows.append((name, -1, curve.at(logits)))
        rows.append(("store", -1, costs.store))
        return rows

    def _work_out(self, tokens: int) -> TokenCosts:
        model, moe, stages = self._model, self.moe_before[-1], self._parallel.pipeline
        prologue = self._section_ns("prologue", tokens)
        block = self._section_ns("pre_attn", tokens) + self._section_ns("post_attn", tokens)
        dense_mlp = self._section_ns("mlp_dense", tokens)
        expert_mlp = self.exchange_ns(tokens) if moe else 0
        if moe and self._gate is not None and not self._gate.draws:
            expert_mlp += self.experts_ns(self._gate.route(max(1, tokens), 0))
        head = self._section_ns("head", tokens)
        load, store = self._memory_ns(tokens)
        hop = 0
        if stages > 1:
            hop = self._collective("point_to_point", self._hidden_bytes(tokens), 2)
        whole = load + prologue + model.layers * block + (model.layers - moe) * dense_mlp
        whole += moe * expert_mlp + head + store + (stages - 1) * hop
        costs = TokenCosts(load, prologue, block, dense_mlp, expert_mlp, head, store, hop, whole)
        self._by_tokens[tokens] = costs
        return costs

    def _run(self, tokens: int) -> int:
        return graph_tokens(tokens) if self._is_padded else tokens

    def _section_ns(self, section: str, tokens: int) -> int:
        """Token-wise rows of a section, one after another, with their all-reduces."""
        total = 0
        tokens = self._run(tokens)
        for layer in self._sections[section]:
            curve = self._bundle.dense.get(layer)
            if curve is not None:
                total += self._compiled_ns(curve, tokens) + self._all_reduce_ns(layer, tokens)
        return total

    def _compiled_ns(self, curve: Curve, tokens: int) -> int:
        return curve.at(tokens) * self._permille // 1000

    def _all_reduce_ns(self, layer: str, tokens: int) -> int:
        ranks = self._parallel.tensor
        if ranks == 1 or layer not in _REDUCED:
            return 0
        return self._collective("all_reduce", self._hidden_bytes(tokens), ranks)

    def _memory_ns(self, tokens: int) -> tuple[int, int]:
        """(input load, output store).

        The last GPU of a tensor-parallel group starts when the first has its input, and a ring
        keeps the lead of the first: its end sees the load twice. Behind a pipeline it does not.
        """
        if self._memory is None:
            return 0, 0
        load = self._memory.access_ns(2 * tokens * self._model.element_bytes)
        if self._parallel.tensor > 1 and self._parallel.pipeline == 1:
            load *= 2
        store = self._memory.access_ns(4 * tokens) if self._memory.stores_output else 0
        return load, store

    def _hidden_bytes(self, tokens: int) -> int:
        return tokens * self._model.hidden * self._model.element_bytes

    def _collective(self, kind: str, size_bytes: int, ranks: int) -> int:
        assert self._collective_ns is not None
        return self._collective_ns(kind, size_bytes, ranks)


def _moe_before(model: ProfileModel) -> list[int]:
    """Number of layers with experts among the first i, for i = 0..layers."""
    flags = model.moe_layers or (bool(model.experts),) * model.layers
    assert len(flags) == model.layers
    counts = [0]
    for has_experts in flags:
        counts.append(counts[-1] + has_experts)
    return counts
