"""Results of inference-perf."""

from __future__ import annotations

from typing import Any

import msgspec

from emu.apps.learn.fields import Level, Sent, check_times, count_of, from_first, number_of
from emu.errors import InputError


def inference_perf_levels(source: str, entries: list[Any]) -> Level:
    sent = []
    skipped = 0
    groups: dict[str, int] = {}
    model = ""
    for index, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise InputError(source, None, str(index), "expected an object")
        if entry.get("error"):
            skipped += 1
            continue
        begin = number_of(source, None, entry, "start_time", f"{index}.start_time")
        info = entry.get("info")
        if not isinstance(info, dict):
            raise InputError(source, None, f"{index}.info", "missing")
        answer = info.get("response_metrics")
        answer = answer if isinstance(answer, dict) else info
        times = answer.get("output_token_times")
        if not isinstance(times, list) or not times:
            problem = "missing or empty; only a streamed answer has a time to the first token"
            raise InputError(source, None, f"{index}.info.output_token_times", problem)
        if not all(isinstance(at, (int, float)) for at in times):
            raise InputError(source, None, f"{index}.info.output_token_times", "expected numbers")
        prompt = info.get("input_tokens")
        if prompt is None:
            metrics = info.get("request_metrics")
            text = metrics.get("text") if isinstance(metrics, dict) else None
            prompt = text.get("input_tokens") if isinstance(text, dict) else None
        first_s, last_s = times[0] - begin, times[-1] - begin
        check_times(source, None, first_s, last_s, f"{index}.info.output_token_times")
        words, name = _prompt(entry.get("request"))
        model = model or name
        sent.append(
            Sent(
                begin,
                count_of(source, None, prompt, f"{index}.info.input_tokens"),
                count_of(
                    source,
                    None,
                    answer.get("output_tokens") or len(times),
                    f"{index}.info.output_tokens",
                ),
                first_s,
                last_s,
                group=groups.setdefault(words, len(groups)) if words else -1,
            )
        )
    name = "inference-perf"
    level = Level(label="requests", tool=name, requests=tuple(sent), skipped=skipped, model=model)
    return from_first(source, level)


def _prompt(request: Any) -> tuple[str, str]:
    """(prompt, model) of a request's body as it was sent; empty if it is not there."""
    if not isinstance(request, str):
        return "", ""
    try:
        body = msgspec.json.decode(request)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return "", ""
    if not isinstance(body, dict):
        return "", ""
    prompt = body.get("prompt") or body.get("messages") or ""
    words = prompt if isinstance(prompt, str) else msgspec.json.encode(prompt).decode()
    return words, str(body.get("model") or "")
