"""The page of a sweep: the trade-off, what each key does, and all points as a table."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from emu.report.atomic import write_text
from emu.report.distributions import PALETTE, Chart, short
from emu.report.html import charts_section, fill, html_table, json_in_script, payload
from emu.report.table import number
from emu.sweeps.conditions import parse_conditions
from emu.sweeps.drive import Answer, SweepResult
from emu.sweeps.results import cell_text, columns_of, front

SHOWN: Final = (
    "completed",
    "p99_ttft_ms",
    "p99_tpot_ms",
    "p99_e2el_ms",
    "output_throughput",
    "request_goodput",
    "gpu_seconds.total",
    "cost",
    "load.verdict",
)
_ROWS_MAX: Final = 500
_KEYS_MAX: Final = 6
_CURVES_MAX: Final = 10
_MORE_IS_BETTER: Final = ("throughput", "goodput", "attainment", "hit_rate", "completed", "rate")


def write_page(result: SweepResult) -> Path:
    """Write report.html; its path."""
    columns = columns_of(result)
    charts = [*_trade_off(result, columns), *_by_key(result, columns)]
    sections = charts_section("trade-off", "Trade-off", charts, "") if charts else ""
    title = f"emu: sweep {Path(result.source).stem}"
    facts = f"<li>{len(result.rows)} points</li><li>{html.escape(result.sweep.kind)}</li>"
    main = (
        f"<header><h1>{html.escape(title)}</h1><ul>{facts}</ul></header>"
        f'<div id="summary">{_answer(result.answer)}</div>'
        f'{sections}<section id="points"><h2>Points</h2>{_table(result, columns)}</section>'
    )
    page = fill(
        "report.html",
        {
            "TITLE": html.escape(title),
            "NAV": '<a href="#trade-off">Trade-off</a><a href="#points">Points</a>',
            "MAIN": main,
            "DATA": json_in_script(payload(charts)),
        },
    )
    path = result.directory / "report.html"
    write_text(path, page)
    return path


def answer_text(answer: Answer) -> str:
    """The answer of a search in one sentence."""
    wanted = " and ".join(answer.conditions)
    name = f"{answer.goal} {answer.key} with {wanted}"
    if answer.value is None:
        return f"{name}: none in the range ({answer.fails_at:g} does not meet it)"
    if answer.fails_at is None:
        text = f"{name}: {answer.value:g}, the end of the range; the true answer may lie beyond"
    else:
        text = f"{name}: {answer.value:g} ({answer.fails_at:g} does not meet it)"
    if not answer.is_monotone:
        text += "; the conditions changed more than once over the range, the first change counts"
    return text


def _answer(answer: Answer | None) -> str:
    return "" if answer is None else f"<p><strong>{html.escape(answer_text(answer))}</strong></p>"


def _numbers(values: Sequence[Any]) -> list[float | None]:
    return [
        float(v) if isinstance(v, (int, float)) and not isinstance(v, bool) else None
        for v in values
    ]


def _trade_off(result: SweepResult, columns: dict[str, list[Any]]) -> list[Chart]:
    names = [result.sweep.plot.x, result.sweep.plot.y]
    if result.sweep.pareto is not None and len(result.sweep.pareto.minimize) > 1:
        names = result.sweep.pareto.minimize[:2]
    if any(name not in columns for name in names):
        return []
    pairs = zip(_numbers(columns[names[0]]), _numbers(columns[names[1]]), strict=True)
    known = [(i, x, y) for i, (x, y) in enumerate(pairs) if x is not None and y is not None]
    if not known:
        return []
    xs, ys = [x for _, x, _ in known], [y for _, _, y in known]
    rows = [result.rows[i] for i, _, _ in known]
    labels = [_label(result, columns, i) for i, _, _ in known]
    low = not any(word in names[0] for word in _MORE_IS_BETTER)
    best = front(rows, xs, ys, x_is_better_low=low)
    data: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": "best trade-off",
            "x": short([xs[i] for i in best]),
            "y": short([ys[i] for i in best]),
            "line": {"color": PALETTE[1], "width": 1.5, "shape": "linear"},
            "hoverinfo": "skip",
        },
        {
            "type": "scatter",
            "mode": "markers",
            "name": "points",
            "x": short(xs),
            "y": short(ys),
            "text": labels,
            "marker": {"color": PALETTE[0], "size": 8},
            "hovertemplate": "%{text}<br>%{x:.4g}, %{y:.4g}<extra></extra>",
        },
    ]
    layout = {
        "xaxis": {"title": {"text": names[0]}},
        "yaxis": {"title": {"text": names[1]}, **_log(ys)},
        "showlegend": True,
    }
    better = "left" if low else "right"
    note = f"each point is a run; better is lower and further {better}"
    title = f"{names[1]} against {names[0]}"
    return [Chart("trade-off", "trade-off", title, note, data, layout, 380, is_wide=True)]


def _log(values: Sequence[float]) -> dict[str, Any]:
    is_wide = min(values) > 0 and max(values) > 20 * min(values)
    return {"type": "log"} if is_wide else {"rangemode": "tozero"}


def _label(result: SweepResult, columns: dict[str, list[Any]], index: int) -> str:
    keys = [*result.keys, *(["seed"] if "seed" in columns else [])]
    return "<br>".join(
        html.escape(f"{key} = {cell_text(columns[key][index])}") for key in keys if key in columns
    )


def _by_key(result: SweepResult, columns: dict[str, list[Any]]) -> list[Chart]:
    """For each numeric key: p99 TTFT and TPOT (the limited figures of a search) over it."""
    limits: dict[str, float | str] = {}
    if result.sweep.search is not None:
        for condition in parse_conditions(result.sweep.search.meet, result.source, "search.meet"):
            limits[condition.name] = condition.limit
    charts = []
    for place, key in enumerate(result.keys[:_KEYS_MAX]):
        if len({x for x in _numbers(columns[key]) if x is not None}) < 2:
            continue
        names = [name for name in limits if name in columns] or ["p99_ttft_ms", "p99_tpot_ms"]
        for name in names:
            curves = _curves(result, columns, key, name)
            if curves:
                charts.append(_key_chart(f"{place}-{name}", key, name, curves, limits.get(name)))
    return charts


def _curves(
    result: SweepResult, columns: dict[str, list[Any]], key: str, name: str
) -> dict[str, list[tuple[float, float]]]:
    """Label -> points along the key; one curve for each choice of the other keys."""
    others = [k for k in (*result.keys, "seed") if k != key and k in columns]
    curves: dict[str, list[tuple[float, float]]] = {}
    pairs = zip(_numbers(columns[key]), _numbers(columns.get(name, [])), strict=False)
    for index, (x, y) in enumerate(pairs):
        if x is not None and y is not None:
            parts = (f"{_short(k, others)} {cell_text(columns[k][index])}" for k in others)
            curves.setdefault(", ".join(parts), []).append((x, y))
    if len(curves) > _CURVES_MAX:  # a cloud, not curves
        return {"": sorted(point for curve in curves.values() for point in curve)}
    return {label: sorted(curve) for label, curve in curves.items()}


def _key_chart(
    name: str,
    key: str,
    figure: str,
    curves: dict[str, list[tuple[float, float]]],
    limit: float | str | None,
) -> Chart:
    data: list[dict[str, Any]] = []
    for index, (label, points) in enumerate(curves.items()):
        xs, ys = [x for x, _ in points], [y for _, y in points]
        colour = PALETTE[index % len(PALETTE)]
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers" if len(set(xs)) == len(xs) else "markers",
                "name": label,
                "x": short(xs),
                "y": short(ys),
                "marker": {"color": colour, "size": 7},
                "line": {"color": colour, "width": 1},
                "hovertemplate": f"{html.escape(label)}<br>%{{x:.5g}}: %{{y:.5g}}<extra></extra>",
            }
        )
    xs = [x for points in curves.values() for x, _ in points]
    ys = [y for points in curves.values() for _, y in points]
    is_log = "type" in _log(xs)
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": key}, **({"type": "log"} if is_log else {})},
        "yaxis": {"title": {"text": figure}, **_log(ys)},
        "showlegend": len(curves) > 1,
    }
    note = ""
    if isinstance(limit, float):
        note = f"the line is the limit, {limit:g}"
        line = {"color": PALETTE[1], "width": 1.5, "dash": "dash"}
        ends = {"xref": "paper", "x0": 0, "x1": 1, "y0": limit, "y1": limit}
        layout["shapes"] = [{"type": "line", **ends, "line": line}]
    chart_id = "key-" + "".join(c if c.isalnum() else "-" for c in name)
    title = f"{figure} over {_short(key, [key])}"
    return Chart(chart_id, "trade-off", title, note, data, layout, 300)


def _short(key: str, keys: Sequence[str]) -> str:
    """The last part of a dotted key, if no other key ends like it."""
    end = key.split(".")[-1]
    return end if [other.split(".")[-1] for other in keys].count(end) <= 1 else key


def _table(result: SweepResult, columns: dict[str, list[Any]]) -> str:
    names = [*result.keys, *(name for name in ("seed", "meets") if name in columns)]
    if any(row.result.status != "completed" for row in result.rows):
        names += ["status", "error"]
    names += [name for name in SHOWN if name in columns]
    names = [name for name in names if any(value not in (None, "") for value in columns[name])]
    head = "".join(
        f'<th scope="col" title="{html.escape(name, quote=True)}">'
        f"{html.escape(_short(name, names) if name in result.keys else name)}</th>"
        for name in names
    )
    rows = ""
    for index in range(min(len(result.rows), _ROWS_MAX)):
        cells = "".join(f"<td>{html.escape(_cell(columns[n][index]))}</td>" for n in names)
        rows += f"<tr>{cells}</tr>"
    caption = f"{len(result.rows)} points"
    if len(result.rows) > _ROWS_MAX:
        caption += f", the first {_ROWS_MAX}; results.csv has all"
    return html_table(caption, head, rows)


def _cell(value: Any) -> str:
    is_number = isinstance(value, float) and not isinstance(value, bool)
    return number(value) if is_number else cell_text(value)
