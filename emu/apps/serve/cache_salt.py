"""The tokens of a request as the prefix cache sees them: salted, where its call says so.

A cache salt enters the hash of the first block, as in vLLM, and so those of all blocks behind it.
Here it stands in the upper bits of the first token's id, which no token has; a recording keeps
ids, so its replay shares what the session shared.
"""

from __future__ import annotations

import hashlib
from typing import Final

import numpy as np

from emu.apps.serve.tokenizer import Ids
from emu.request import Prefix

_SALT_SHIFT: Final = 31
_SALT_BYTES: Final = 8


def salted_prefix(prompt: Ids, output: Ids, cache_salt: str) -> Prefix:
    """The tokens of a request, as only requests with the same salt share them; empty = no salt."""
    ids = np.concatenate((prompt, output))
    if cache_salt:
        digest = hashlib.blake2b(cache_salt.encode(), digest_size=_SALT_BYTES).digest()
        salt = 1 + int.from_bytes(digest, "big") % (2**_SALT_SHIFT - 1)
        ids[0] += salt << _SALT_SHIFT
    return Prefix(ids)


def unsalted(ids: Ids) -> Ids:
    """The tokens as they were given."""
    return np.bitwise_and(ids, np.int64(2**_SALT_SHIFT - 1))
