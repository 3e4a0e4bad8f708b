"""Log-probabilities of an answer's tokens, in OpenAI's forms.

The figures are invented and follow from the position alone. They are consistent (the chosen token
is the likeliest, probabilities add up to less than one), and mean nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from emu.apps.serve.tokenizer import Ids, Tokenizer, split_tokens

LOGPROBS_MAX: Final = 20


def logprob_at(position: int) -> float:
    """The chosen token's log-probability, between -0.05 and -0.4."""
    return -0.05 * (1 + position * 7 % 8)


def alternatives(
    tokenizer: Tokenizer, piece: str, position: int, count: int
) -> list[tuple[str, float]]:
    """The `count` likeliest tokens, the chosen one first."""
    first = logprob_at(position)
    found = [(piece, first)][:count]
    rest = max(1e-6, 1 - math.exp(first))
    pool = tokenizer.pieces
    seen = {piece}
    step = position
    while len(found) < count and len(seen) <= len(set(pool)):
        other = pool[step % len(pool)]
        step += 1
        if step - position > 4 * len(pool):
            break
        if other in seen:
            continue
        seen.add(other)
        rest /= 2
        found.append((other, math.log(rest)))
    return found


def chat_logprobs(
    tokenizer: Tokenizer, pieces: Sequence[str], first: int, top: int
) -> dict[str, object]:
    """OpenAI's form for chats.

    `first` is the position of the first piece, `top` the number of alternatives.
    """

    def entry(token: str, logprob: float) -> dict[str, object]:
        return {"token": token, "logprob": logprob, "bytes": list(token.encode())}

    return {
        "content": [
            {
                **entry(piece, logprob_at(first + n)),
                "top_logprobs": [
                    entry(*other) for other in alternatives(tokenizer, piece, first + n, top)
                ],
            }
            for n, piece in enumerate(pieces)
        ]
    }


def completion_logprobs(
    tokenizer: Tokenizer,
    pieces: Sequence[str],
    first: int,
    top: int,
    *,
    offset: int,
    is_prompt: bool = False,
) -> dict[str, list[object]]:
    """OpenAI's form for completions; of a prompt, the first token has none.

    `first` is the position of the first piece, `top` the number of alternatives.
    """
    offsets, at = [], offset
    for piece in pieces:
        offsets.append(at)
        at += len(piece)
    logprobs: list[float | None] = [logprob_at(first + n) for n in range(len(pieces))]
    tops: list[dict[str, float] | None] = [
        dict(alternatives(tokenizer, piece, first + n, max(top, 1)))
        for n, piece in enumerate(pieces)
    ]
    if is_prompt and pieces:
        logprobs[0] = tops[0] = None
    return {
        "tokens": [*pieces],
        "token_logprobs": [*logprobs],
        "text_offset": [*offsets],
        "top_logprobs": [*tops],
    }


def prompt_pieces(tokenizer: Tokenizer, prompt: Ids) -> list[str]:
    """Texts of the prompt's tokens."""
    ids = [i for i in prompt.tolist() if 0 <= i < tokenizer.vocab_size]
    pieces = split_tokens(tokenizer, tokenizer.decode(ids))
    if len(pieces) == len(prompt):
        return pieces
    known = set(ids)
    return [tokenizer.decode([i]) if i in known else "" for i in prompt.tolist()]
