"""Corrections on top of a backend: what each scales, and leaps that equal steps."""

from __future__ import annotations

import msgspec
import pytest

from emu.catalogue.lookup import lookup_gpu, lookup_model
from emu.engines.registry import BUNDLES
from emu.latency.base import BatchShape, LatencyBackend, Verify, stepped_decode_run
from emu.latency.corrected import CorrectedBackend
from emu.latency.linear import LinearBackend
from emu.latency.roofline import RooflineBackend

SHIPPED = BUNDLES["vllm-0.15"].model


def roofline(pp: int = 1) -> RooflineBackend:
    return RooflineBackend(
        lookup_model("meta-llama/Llama-3.1-8B"), lookup_gpu("H100-SXM5-80GB"), pp=pp
    )


def linear() -> LinearBackend:
    return LinearBackend(1000.0, 10.0, 0.5, 0.0, stages=1, layers=4)


def decodes(count: int = 20, context: int = 1000) -> BatchShape:
    return BatchShape(
        decode_count=count,
        decode_context_sum=count * context,
        decode_context_max=context,
        decode_context_min=context,
        sequences=count,
    )


def with_prompt() -> BatchShape:
    shape = decodes()
    shape.prefill_new, shape.prefill_context, shape.sequences = [500], [0], 21
    return shape


def corrected(inner: LatencyBackend, **changes: float) -> CorrectedBackend:
    return CorrectedBackend(inner, msgspec.structs.replace(SHIPPED, **changes))  # type: ignore[arg-type]


def test_the_shipped_engine_has_no_corrections() -> None:
    assert not SHIPPED.is_corrected
    assert msgspec.structs.replace(SHIPPED, added_step_ns=-1).is_corrected


def test_neutral_corrections_change_nothing() -> None:
    inner = roofline()
    same = corrected(inner)
    for shape in (decodes(), with_prompt(), BatchShape([700], [0], sequences=1)):
        assert same.iteration_ns(shape) == inner.iteration_ns(shape)
        assert same.components_ns(shape) == inner.components_ns(shape)


def test_each_class_of_work_is_scaled_by_itself() -> None:
    inner = roofline()
    whole, bare = inner.iteration_ns(decodes()), inner.iteration_ns(decodes(context=0))
    mixed = inner.iteration_ns(with_prompt())
    near = {"abs": 2}
    doubled = corrected(inner, weights_time=2.0)
    assert doubled.iteration_ns(decodes()) == pytest.approx(whole + bare, **near)
    doubled = corrected(inner, context_time=2.0)
    assert doubled.iteration_ns(decodes()) == pytest.approx(2 * whole - bare, **near)
    doubled = corrected(inner, prompt_time=2.0)
    assert doubled.iteration_ns(decodes()) == whole
    assert doubled.iteration_ns(with_prompt()) == pytest.approx(2 * mixed - whole, **near)


def test_verified_drafts_are_decodes_not_prompts() -> None:
    inner = roofline()
    shape = decodes()
    shape.verify = Verify(count=5, tokens=20, context_sum=5000)
    shape.sequences = 25
    same = corrected(inner, prompt_time=3.0)
    assert same.iteration_ns(shape) == pytest.approx(inner.iteration_ns(shape), abs=2)
    assert corrected(inner, weights_time=2.0).iteration_ns(shape) > 1.5 * inner.iteration_ns(shape)


def test_time_is_added_by_step_sequence_and_chunk() -> None:
    inner = roofline()
    added = corrected(inner, added_step_ns=1000, added_sequence_ns=10, added_prompt_ns=7)
    extra = added.iteration_ns(with_prompt()) - inner.iteration_ns(with_prompt())
    assert extra == 1000 + 21 * 10 + 7
    assert corrected(inner, added_step_ns=-(10**12)).iteration_ns(decodes()) == 1


@pytest.mark.parametrize("inner", [roofline(), linear(), roofline(pp=2)])
def test_a_leap_equals_stepping(inner: LatencyBackend) -> None:
    backend = corrected(
        inner, weights_time=1.13, context_time=0.71, added_step_ns=-54_321, added_sequence_ns=99
    )
    shape = decodes(count=7, context=333)
    leap = backend.decode_run_ns(shape, 60)
    assert (leap == stepped_decode_run(backend, shape, 60)).all()
    assert sum(backend.stage_ns(shape)) == backend.iteration_ns(shape)
    assert sum(backend.components_ns(shape).values()) == backend.iteration_ns(shape)
