"""One kit for pages and charts: what reports, comparisons and applications are drawn with.

    from emu.report.page.chart import Chart, Series, spread_axis
    from emu.report.page.pages import page

    chart = Chart(...)                                          # data; says nothing of its looks
    write_text(path, page("sweep.html", title="...", charts=[chart], rows=rows))

- `chart.py`: what a chart is (`Chart` of `Series`, `Heat`, `Spans`, `Limit`, `Region`), its axes
  (`spread_axis`, `close_axis`, `log_axis`), the palette, and which points are best (`front`).
- `pages.py`: a template of this folder with its charts as one file that needs no network (`page`),
  and the helpers of templates. A new page is a template here that extends `base.html`.
- `panels.py`: small pictures as SVG for documents (`svg` of `Panel` rows), by matplotlib.

A run's own charts are made in `emu/report/run_charts.py`, `state_charts.py` and
`latency_charts.py`; `emu/report/figures.py` draws the same `Chart` for papers.
"""
