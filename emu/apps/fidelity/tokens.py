"""Whether the prompts of a measured run share prefixes that its record does not tell."""

from __future__ import annotations

from emu.apps.fidelity.enginesettings import scheduler_keys
from emu.apps.fidelity.record import Case


def unknown_tokens(case: Case, workload: str) -> str:
    """Why the emulated run cannot have the measured one's prefix hits; empty if it can.

    `workload`: as `case_config` made it.
    """
    if scheduler_keys(case).get("prefix_caching") is False:
        return ""
    lines = workload.splitlines()
    unknown = sum('"input_tok_ids"' not in line for line in lines)
    if not unknown:
        return ""
    stated = case.meta.get("dataset_path")
    if case.dataset is not None:
        return f"{case.dataset} lacks the tokens of {unknown} of {len(lines)} prompts"
    if isinstance(stated, str) and stated:
        return f"{stated} (or one with its sha256) is not in {case.directory} nor above it"
    return "the record names no dataset"
