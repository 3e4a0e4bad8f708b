"""An iteration whose attention and experts are on different GPUs (attention apart from experts).

Owns the step time of a group whose experts lie on GPUs beside its members (`engine.expert_gpus`).
The batch of each member is cut into micro-batches that go around: attention of a layer on the
member, its rows over the network to the experts, their products, the results back, attention of the
next layer. While one is computed on one side, others are under way or on the other side:

    T = (A + E + D + K) + P (m L - 1),  P = max(A, E, D, K, (A + E + D + K) / m)

for m micro-batches and L layers with experts; A is attention of a micro-batch with everything that
members compute (norms, router, shared expert), E the routed experts of all members' rows on the
expert GPUs, D and K the ways there and back. With one micro-batch each layer is a round trip; with
enough of them the slower side sets the pace (MegaScale-Infer, arXiv 2504.02263: T_f = max(A, E)
where the network is faster than both).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from emu.latency.base import BatchShape
from emu.latency.experts.overlap import OverlappedBackend, part_of
from emu.latency.experts.setting import ExpertSetting
from emu.latency.roofline import RooflineBackend
from emu.units import NS_PER_S

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class ApartBackend(OverlappedBackend):
    """Implements `LatencyBackend` around a roofline whose experts are on GPUs of their own."""

    def __init__(self, inner: RooflineBackend, setting: ExpertSetting, processors: int) -> None:
        super().__init__(inner, setting, processors)
        self._micro_batches = setting.micro_batches

    def _overlaps(self, shape: BatchShape) -> bool:
        """Every iteration of all layers goes around."""
        return shape.layers < 0 and not shape.start_layer

    def _sides(self, shape: BatchShape) -> tuple[int, int, int]:
        """What a member computes for a micro-batch in a layer beside core attention, the longest
        of the other stations, and the sum of those."""
        part = self._parts_in(shape, self._micro_batches)
        own_s = part.before_s + part.after_s + part.shared_s
        others = (part.experts_s, part.dispatch_s, part.combine_s)
        return round(own_s * NS_PER_S), round(max(others) * NS_PER_S), round(sum(others) * NS_PER_S)

    def _in_layers_ns(self, shape: BatchShape) -> int:
        whole_ns = self.inner.attention_ns(shape)
        part_ns = self._part_ns(shape, whole_ns)
        own_ns, longest_ns, others_ns = self._sides(shape)
        around_ns = own_ns + part_ns // self._layers + others_ns
        pace_ns = max(around_ns - others_ns, longest_ns, around_ns // self._micro_batches)
        turns = self._micro_batches * self._moe_layers - 1
        return around_ns + pace_ns * turns + self._others_ns(whole_ns)

    def _part_ns(self, shape: BatchShape, whole_ns: int) -> int:
        """Core attention of a micro-batch in all layers."""
        if shape.prefill_new:
            return whole_ns // self._micro_batches
        return self.inner.attention_ns(part_of(shape, self._micro_batches))

    def attention_run_ns(self, shape: BatchShape, steps: int) -> NDArray[np.int64]:
        """`attention_ns` of each of so many decode iterations in a row."""
        import numpy as np

        if not self._overlaps(shape):
            return self._inner_attention(shape, steps)
        whole = self._inner_attention(shape, steps)
        part = self._inner_attention(part_of(shape, self._micro_batches), steps)
        own_ns, longest_ns, others_ns = self._sides(shape)
        around = own_ns + part // self._layers + others_ns
        pace = np.maximum(around - others_ns, longest_ns)
        pace = np.maximum(pace, around // self._micro_batches)
        turns = self._micro_batches * self._moe_layers - 1
        others = whole * (self._layers - self._moe_layers) // self._layers
        total: NDArray[np.int64] = around + pace * turns + others
        return total
