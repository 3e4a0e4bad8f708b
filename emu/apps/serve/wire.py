"""The forms that vLLM's versions have of KV events and of metrics: one setting switches all."""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec import Struct

from emu.errors import InputError


class Wire(Struct, frozen=True):
    """What a version of vLLM writes: its minor number says all."""

    minor: int

    @property
    def has_maps(self) -> bool:
        """Events are maps, not arrays."""
        return self.minor >= 24

    @property
    def replays_topic(self) -> bool:
        """Answers to a replay have the topic."""
        return self.minor >= 26

    @property
    def says_why_waiting(self) -> bool:
        """Requests that wait are also counted by reason."""
        return self.minor >= 20

    @property
    def counts_recomputed(self) -> bool:
        """Prompts that were cached whole, and are computed again for one token, are counted."""
        return self.minor < 20

    @property
    def shows_preemptions(self) -> bool:
        """There is a histogram of the preemptions of a request."""
        return self.minor >= 30

    def stored(
        self,
        keys: Sequence[int],
        parent: int | None,
        tokens: Sequence[int],
        block_size: int,
        extra_keys: list[list[str] | None] | None = None,
        *,
        lora_name: str | None = None,
        lora_id: int | None = None,
    ) -> object:
        """One BlockStored. `parent` is the key before the first; `extra_keys`: of each block, what
        its hash has beside its tokens."""
        if self.has_maps:
            event = {
                "type": "BlockStored",
                "block_hashes": list(keys),
                "parent_block_hash": parent,
                "token_ids": list(tokens),
                "block_size": block_size,
                "lora_id": lora_id,
                "medium": "GPU",
                "lora_name": lora_name,
            }
            return event if extra_keys is None else {**event, "extra_keys": extra_keys}
        head: list[object] = ["BlockStored", list(keys), parent, list(tokens), block_size]
        fields = [*head, lora_id, "GPU", lora_name]
        if self.minor >= 17:
            fields.append(extra_keys)
        if self.minor >= 20:
            fields.append(0)  # group_idx
        if self.minor >= 22:
            fields += [None, None]  # kv_cache_spec_kind, kv_cache_spec_sliding_window
        return fields

    def removed(self, keys: Sequence[int]) -> object:
        """One BlockRemoved."""
        if self.has_maps:
            return {"type": "BlockRemoved", "block_hashes": list(keys), "medium": "GPU"}
        return ["BlockRemoved", list(keys), "GPU"]

    def cleared(self) -> object:
        """One AllBlocksCleared."""
        return {"type": "AllBlocksCleared"} if self.has_maps else ["AllBlocksCleared"]


def wire_of(name: str) -> Wire:
    """`vllm-0.19`. Raises InputError."""
    found = re.fullmatch(r"vllm-0\.(\d+)", name)
    if found is None or not 16 <= int(found[1]) <= 33:
        raise InputError("serve", None, "--wire", f"is vllm-0.16 to vllm-0.33, not {name!r}")
    return Wire(int(found[1]))
