"""The requests of a measured run as a workload, in the order of their ids."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from emu.apps.fidelity.record import Case
from emu.config.input_files import read_input
from emu.documents import Document
from emu.errors import InputError
from emu.report.measurement import number_of, records, request_ids


def workload_text(case: Case) -> str:
    """The measured requests as JSON Lines of ours, in the order of their ids.

    A measured id is `bench-<n>`, n the line of the dataset.
    """
    found = list(records(case.requests, read_input(case.requests)))
    if not found:
        raise InputError(str(case.requests), None, "", "no measured request")
    sent = [] if case.dataset is None else _planned(case.dataset)
    ids = request_ids([record for _, record in found])
    has_arrivals = all(record.get("arrival_time") is not None for _, record in found)
    clock = "arrival_time" if has_arrivals else "queued_ts"
    rows = sorted(
        (number, *_measured_request(case.requests, line, record, clock))
        for number, (line, record) in zip(ids, found, strict=True)
    )
    first = min(arrival for _, arrival, _, _ in rows)
    lines = []
    for number, arrival, prompt, output in rows:
        row = {
            "arrival_time_ns": round((arrival - first) * 1e9),
            "input_toks": prompt,
            "output_toks": output,
        }
        planned = sent[number] if number < len(sent) else {}
        for length, tokens in (("input_toks", "input_tok_ids"), ("output_toks", "output_tok_ids")):
            if tokens in planned and len(planned[tokens]) == row[length]:
                row[tokens] = planned[tokens]
        lines.append(json.dumps(row) + "\n")
    return "".join(lines)


def _planned(dataset: Path) -> list[Document]:
    """Lines of the dataset; none if it is of another format (its tokens are not known then)."""
    try:
        lines = [msgspec.json.decode(line) for line in dataset.read_bytes().splitlines()]
    except (msgspec.DecodeError, UnicodeDecodeError):
        return []
    return lines if all(isinstance(line, dict) for line in lines) else []


def _measured_request(
    source: Path, line: int, record: Document, clock: str
) -> tuple[float, int, int]:
    """(arrival in s, prompt tokens, output tokens) of a line."""
    arrival, prompt, output = (
        number_of(source, line, record, key) for key in (clock, "input_toks", "output_toks")
    )
    return arrival, int(prompt), int(output)
