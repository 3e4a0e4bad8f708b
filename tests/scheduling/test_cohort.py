"""The cohort's own arithmetic, against asking step by step."""

from __future__ import annotations

import pytest

from emu.request import Request
from emu.scheduling.cohort import Cohort, RunningRequest


@pytest.mark.parametrize("prompts", [(8,), (8, 12), (8, 9, 10), (7, 11, 8, 6), (1,)])
@pytest.mark.parametrize("steps", [1, 3, 4, 5, 11, 64])
def test_steps_that_do_something(prompts: tuple[int, ...], steps: int) -> None:
    """Blocks of four tokens; every second member fills blocks that others can find."""
    cohort = Cohort(4, track_members=True)
    cohort.step = 5
    for number, prompt in enumerate(prompts):
        request = Request(
            request_id=number,
            arrival_ns=0,
            prompt_tokens=prompt,
            output_tokens=100,
            max_output_tokens=100,
        )
        request.computed_tokens, request.generated_tokens = prompt, 1
        if number % 2:
            request.known_blocks = 50
        cohort.join(RunningRequest(request, admission=number))
    found = list(cohort.busy_steps(steps))
    start = cohort.step
    busy = []
    for step in range(start, start + steps):
        cohort.step = step
        if cohort.blocks_next() or cohort.fillers():
            busy.append(step)
    assert found == busy
    assert busy or steps < 4
