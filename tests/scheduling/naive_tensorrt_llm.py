"""TensorRT-LLM's scheduling as its sources go about it: a walk over all active requests.

Restates `capacityScheduler.cpp` and `microBatchScheduler.cpp` in the order of their loops, without
a cache and without overlap, for comparison with `emu/scheduling/tensorrt_llm/`.
"""

from __future__ import annotations

from dataclasses import dataclass

from emu.config.schema import TensorrtLlmTable


@dataclass
class Active:
    rid: int
    prompt: int
    """Grows by the outputs made so far when the request is paused."""
    output: int
    output_max: int
    made: int = 0
    computed: int = 0
    blocks: int = 0

    @property
    def is_generating(self) -> bool:
        return self.computed >= self.prompt

    @property
    def is_started(self) -> bool:
        return self.blocks > 0


@dataclass
class Naive:
    table: TensorrtLlmTable
    num_blocks: int
    active: list[Active]

    @property
    def free(self) -> int:
        return self.num_blocks - sum(one.blocks for one in self.active)

    def blocks_of(self, tokens: int) -> int:
        return -(-tokens // self.table.block_size)

    def remaining(self, one: Active) -> int:
        # Of a request that was paused, outputs are a part of the prompt.
        total = one.prompt + one.output_max - (one.made - self.made_since(one))
        return self.blocks_of(total) - one.blocks

    def made_since(self, one: Active) -> int:
        """Outputs since its context was computed."""
        return max(0, one.computed + 1 - one.prompt) if one.is_generating else 0

    # --- capacity ---------------------------------------------------------------------------
    def no_evict(self) -> list[Active]:
        free, most = self.free, self.table.requests_max
        taken = [one for one in self.active if one.is_generating][:most]
        free -= sum(self.remaining(one) for one in taken)
        if self.table.capacity_scheduler_policy == "STATIC_BATCH" and any(
            one.is_started for one in self.active
        ):
            return taken + [one for one in self.active if one.is_started and one not in taken]
        for one in self.active:
            if one in taken:
                continue
            if len(taken) == most or self.remaining(one) > free:
                break
            free -= self.remaining(one)
            taken.append(one)
        return taken

    def need(self, one: Active) -> int:
        if not one.is_started:
            return self.blocks_of(one.prompt)
        return self.blocks_of(one.computed + 1) - one.blocks if one.is_generating else 0

    def max_utilization(self) -> tuple[list[Active], list[Active]]:
        free, taken, paused = self.free, [], []
        end, at = len(self.active), 0
        while at < end:
            one = self.active[at]
            if self.need(one) <= free and len(taken) < self.table.requests_max:
                free -= self.need(one)
                taken.append(one)
                at += 1
                continue
            last = next((i for i in range(end - 1, at - 1, -1) if self.active[i].is_started), None)
            if last is None:
                break
            victim = self.active[last]
            free += victim.blocks
            paused.append(victim)
            end = last
        return taken, paused

    # --- micro batch ------------------------------------------------------------------------
    def step(self) -> dict[int, int]:
        """New tokens of each member of an iteration, which has ended afterwards."""
        table, paused = self.table, []
        if table.capacity_scheduler_policy == "MAX_UTILIZATION":
            fitting, paused = self.max_utilization()
        else:
            fitting = self.no_evict()
        for one in paused:
            one.prompt, one.computed, one.blocks = one.prompt + self.made_since(one), 0, 0
        left, found, contexts = table.tokens_max, {}, []
        for one in fitting:
            cost = 1 if one.is_generating else one.prompt - one.computed
            if not one.is_generating and table.enable_chunked_prefill:
                contexts.append(one)
                continue
            if cost > left:
                break
            left -= cost
            found[one.rid] = cost
        lengths = [one.prompt - one.computed for one in contexts]
        if sum(lengths) > left:
            lengths = self.cut(lengths, left)
        found |= {one.rid: n for one, n in zip(contexts, lengths, strict=True) if n}
        for one in list(self.active):
            if one.rid in found:
                self.compute(one, found[one.rid])
        return found

    def cut(self, lengths: list[int], left: int) -> list[int]:
        unit = self.table.block_size
        if self.table.context_chunking_policy == "FIRST_COME_FIRST_SERVED":
            cut = []
            for length in lengths:
                tokens = min(length, left)
                if tokens < length:
                    tokens = tokens // unit * unit
                cut.append(tokens)
                left -= tokens
            return cut
        cut, grew = [0] * len(lengths), 1
        while grew:
            grew = 0
            for at, length in enumerate(lengths):
                more = min(cut[at] + unit, length) - cut[at]
                if sum(cut) + more <= left:
                    cut[at] += more
                    grew += more
        return cut

    def compute(self, one: Active, new: int) -> None:
        one.blocks = max(one.blocks, self.blocks_of(max(one.prompt, one.computed + new)))
        one.computed += new
        if one.computed >= one.prompt:
            one.made += 1
            if one.made == one.output:
                self.active.remove(one)
