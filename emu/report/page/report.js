"use strict";
(function () {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const scales = {
    light: [[0, "#dbe9ff"], [0.35, "#7fb0ff"], [0.7, "#2f6fe0"], [1, "#0b2f80"]],
    dark: [[0, "#1c3b6e"], [0.35, "#2f7fd6"], [0.7, "#7ad0e8"], [1, "#f7f3a1"]],
  };

  function theme() {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    return { text: colour("--text"), soft: colour("--soft"), line: colour("--line"), card: colour("--card") };
  }

  function axis(given, colours) {
    return Object.assign(
      { gridcolor: colours.line, zerolinecolor: colours.line, linecolor: colours.line, automargin: true },
      given || {}
    );
  }

  function layoutOf(figure, colours) {
    const given = figure.layout;
    return Object.assign({}, given, {
      height: figure.height,
      margin: { l: 56, r: 14, t: 8, b: 44 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: colours.text, size: 12, family: "system-ui, sans-serif" },
      hoverlabel: { bgcolor: colours.card, bordercolor: colours.line, font: { color: colours.text } },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colours.soft, activecolor: colours.text },
      legend: {
        orientation: "h", x: 0, y: 1.02, yanchor: "bottom", traceorder: "normal", font: { color: colours.soft },
      },
      xaxis: axis(given.xaxis, colours),
      yaxis: axis(given.yaxis, colours),
    });
  }

  function dataOf(figure) {
    const scale = dark.matches ? scales.dark : scales.light;
    return figure.data.map((trace) =>
      trace.type === "heatmap" ? Object.assign({}, trace, { colorscale: scale }) : trace
    );
  }

  const config = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d"] };

  function drawAll() {
    const colours = theme();
    return Promise.all(
      figures.map((figure) =>
        Plotly.react(figure.id, dataOf(figure), layoutOf(figure, colours), config)
      )
    ).then(() => { document.documentElement.dataset.drawn = String(figures.length); });
  }

  // A chart has the focus: arrows pan, plus and minus zoom, 0 shows everything again.
  document.addEventListener("keydown", (event) => {
    const chart = event.target.closest && event.target.closest(".chart");
    if (!chart || !chart._fullLayout || event.ctrlKey || event.metaKey || event.altKey) return;
    const range = chart._fullLayout.xaxis.range.slice();
    const middle = (range[0] + range[1]) / 2;
    const half = (range[1] - range[0]) / 2;
    const moves = {
      ArrowLeft: [range[0] - half / 2, range[1] - half / 2],
      ArrowRight: [range[0] + half / 2, range[1] + half / 2],
      "+": [middle - half / 1.5, middle + half / 1.5],
      "-": [middle - half * 1.5, middle + half * 1.5],
    };
    if (event.key === "0") {
      const given = (figures.find((figure) => figure.id === chart.id) || { layout: {} }).layout;
      const update = { "xaxis.autorange": true };
      if (given.yaxis && given.yaxis.range) update["yaxis.range"] = given.yaxis.range.slice();
      Plotly.relayout(chart, update);
    } else if (moves[event.key]) {
      Plotly.relayout(chart, { "xaxis.range": moves[event.key] });
    } else {
      return;
    }
    event.preventDefault();
  });

  dark.addEventListener("change", drawAll);
  drawAll();
})();
