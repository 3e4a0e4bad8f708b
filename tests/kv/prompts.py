"""Requests whose prompts are runs of token ids."""

from __future__ import annotations

import numpy as np

from emu.request import Prefix, Request


def request(number: int, prompt: int, first: int = 0) -> Request:
    """A prompt of the tokens from `first` on."""
    return Request(
        request_id=number,
        arrival_ns=0,
        prompt_tokens=prompt,
        output_tokens=8,
        max_output_tokens=8,
        prefix=Prefix(np.arange(first, first + prompt + 8)),
    )
