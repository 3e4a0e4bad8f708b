"""What was seen of a real server, as measured runs are written.

requests.jsonl   request_id, input_toks, output_toks, arrival_time, queued_ts, scheduled_ts,
                 first_token_ts, last_token_ts (s, one clock); scheduled_ts is null, because a
                 client cannot see it
result.json      as `vllm bench serve --save-result --save-detailed` writes: ttfts, itls, ...
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from emu.apps.observe.drive import Observed
from emu.documents import Document
from emu.report.atomic import write_bytes, write_text


def write_results(directory: Path, seen: list[Observed], duration_s: float) -> Document:
    """Both files; returns the figures of result.json without its lists."""
    directory.mkdir(parents=True, exist_ok=True)
    done = [one for one in seen if not one.error]
    lines = [
        msgspec.json.encode(
            {
                "request_id": f"bench-{one.request.request_id}",
                "input_toks": one.request.prompt_tokens,
                "output_toks": len(one.token_s),
                "arrival_time": one.sent_s,
                "queued_ts": one.sent_s,
                "scheduled_ts": None,
                "first_token_ts": one.token_s[0],
                "last_token_ts": one.token_s[-1],
                "cached_toks": one.cached_tokens,
            }
        )
        for one in done
    ]
    write_bytes(directory / "requests.jsonl", b"".join(line + b"\n" for line in lines))
    ttfts = [one.token_s[0] - one.sent_s if one.token_s else 0.0 for one in seen]
    itls = [np.diff(one.token_s).tolist() for one in seen]
    figures: Document = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(seen) - len(done),
        "total_input_tokens": sum(one.request.prompt_tokens for one in done),
        "total_output_tokens": sum(len(one.token_s) for one in done),
    }
    good = [index for index, one in enumerate(seen) if not one.error]
    figures |= _statistics("ttft", [ttfts[i] for i in good])
    figures |= _statistics("itl", [gap for i in good for gap in itls[i]])
    tpots = [float(np.mean(itls[i])) for i in good if itls[i]]
    figures |= _statistics("tpot", tpots)
    figures |= _statistics("e2el", [one.token_s[-1] - one.sent_s for one in done])
    detailed = {
        **figures,
        "input_lens": [one.request.prompt_tokens for one in seen],
        "output_lens": [len(one.token_s) for one in seen],
        "ttfts": ttfts,
        "itls": itls,
        "errors": [one.error for one in seen],
    }
    write_text(directory / "result.json", msgspec.json.encode(detailed).decode() + "\n")
    return figures


def _statistics(name: str, values_s: list[float]) -> dict[str, float]:
    if not values_s:
        return {}
    table = np.array(values_s) * 1e3
    found = {f"mean_{name}_ms": float(table.mean()), f"median_{name}_ms": float(np.median(table))}
    for percent in (90, 95, 99):
        found[f"p{percent}_{name}_ms"] = float(np.percentile(table, percent))
    return found
