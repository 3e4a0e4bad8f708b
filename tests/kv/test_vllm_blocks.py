"""Random schedules of windowed and hybrid models: blocks as vLLM's own manager gives them.

The answers of vLLM 0.33 were recorded by `python -m benchmarks.vllm_blocks ... --write`: the first
50 seeds, and those in which a hit of chunked layers is shortened after their look-up.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.vllm_blocks import FORMS, digest, schedule

RECORDED = json.loads(Path(__file__).with_name("vllm_blocks.json").read_text())


@pytest.mark.parametrize("seed", RECORDED)
def test_hits_refusals_and_block_ids_are_those_of_vllm(seed):
    form, operations, theirs = RECORDED[seed]
    program, answers = schedule(int(seed))
    assert program["form"] == form
    assert len(answers) == operations
    assert digest(answers) == theirs


def test_every_form_of_model_is_among_them():
    assert {form for form, _, _ in RECORDED.values()} == set(FORMS)
