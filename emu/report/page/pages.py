"""The pages that emu writes: one template engine, one style, one script, one chart library.

    text = page("run.html", title="...", charts=charts, ...)

Templates are Jinja's and stand in `page/`; every value is escaped where it is put in. A page is
one file that asks for nothing from outside: style, script and ECharts stand in it, and the data
of its charts as JSON.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from emu.report.page.chart import Chart, payload
from emu.report.table import number

PAGES: Final = Path(__file__).parent


@functools.cache
def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(PAGES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["number"] = cell
    made.filters["breakable"] = breakable
    return made


def page(
    template: str,
    *,
    title: str,
    charts: Sequence[Chart],
    sections: Iterable[tuple[str, str]] = (),
    **parts: object,
) -> str:
    """A template of `page/` with what it shows; `charts` are drawn where it places them.

    `sections`: (key, head) of parts that charts are in; those without any are left out.
    """
    filled = {chart.section for chart in charts}
    shown = {"title": title, "charts": charts, "data": json_in_script(payload(charts)), **parts}
    shown["sections"] = [(key, head) for key, head in sections if key in filled]
    return _rendered(template, asset("charts.js"), asset("page.css"), shown)


def live_page(facts: object) -> str:
    """The page of a live server; what it shows comes over its event stream.

    `facts`: what does not change while the server runs.
    """
    script = asset("charts.js") + asset("live.js")
    style = asset("page.css") + asset("live.css")
    shown = {"facts": json_in_script(facts)}
    return _rendered("live.html", script, style, shown, asks="'self'")


def _rendered(
    template: str, script: Markup, style: Markup, shown: Mapping[str, object], asks: str = "'none'"
) -> str:
    """A page with its scripts and styles inside; `asks`: where its script may ask for more."""
    echarts = asset("echarts/echarts.min.js")
    frame = {
        "policy": content_policy(echarts, script, asks=asks),
        "style": style,
        "echarts": echarts,
        "script": script,
    }
    return _environment().get_template(template).render({**frame, **shown})


def asset(name: str) -> Markup:
    """A file of `page/` as it is; none of them holds an end of its element."""
    return Markup((PAGES / name).read_text(encoding="utf-8"))


def content_policy(*scripts: str, asks: str = "'none'") -> str:
    """What a browser lets a page do: run these scripts and no other, and load nothing.

    So a name from a run that got into a page as markup would run nothing. `asks`: where its
    scripts may ask.
    """
    digests = (hashlib.sha256(script.encode()).digest() for script in scripts)
    hashes = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; "
        f"img-src data: blob:; connect-src {asks}; base-uri 'none'; form-action 'none'"
    )


def json_in_script(value: object) -> Markup:
    """JSON that cannot end the script element it stands in."""
    return Markup(msgspec.json.encode(value).decode().replace("<", "\\u003c"))


def breakable(name: str) -> Markup:
    """A name that breaks between its parts (`p95_`, `ttft_`, `ms`), not in the middle of one."""
    return Markup("<wbr>").join(escape(part) for part in re.split(r"(?<=[_.])", name))


def cell(value: object) -> str:
    """A value of a table: figures with four digits, words as they are."""
    if value is None:
        return "-"
    return number(value) if isinstance(value, float) else str(value)
