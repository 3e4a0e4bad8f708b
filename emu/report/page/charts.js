"use strict";
// Draws the charts of a page (emu/report/page/chart.py says what they are made of) with ECharts.
// Used by the pages of runs, comparisons, sweeps and experiments, and by the live page.
const emuCharts = (function () {
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const scales = {
    light: ["#e3edfb", "#9cc3f2", "#4a8fe0", "#1f5bb5", "#0b2f6b"],
    dark: ["#20375a", "#2c5f9e", "#4f97cf", "#93cbe0", "#f3f0b0"],
  };
  const symbols = {
    cross: "path://M0,2 L2,0 L5,3 L8,0 L10,2 L7,5 L10,8 L8,10 L5,7 L2,10 L0,8 L3,5 Z",
    star: "path://M5,0 L6.2,3.6 L10,3.6 L7,5.9 L8.1,9.6 L5,7.4 L1.9,9.6 L3,5.9 L0,3.6 L3.8,3.6 Z",
    down: "path://M0,1 L10,1 L5,10 Z",
    up: "triangle", diamond: "diamond", square: "rect", circle: "circle", pin: "pin",
  };
  const drawn = new Map();

  function theme() {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    return { text: colour("--text"), soft: colour("--soft"), line: colour("--line"), card: colour("--card"), poor: colour("--poor") };
  }

  function short(value) {
    if (value === null || value === undefined || Number.isNaN(value)) return "-";
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 1e5) return value.toLocaleString("en", { maximumFractionDigits: 0 });
    return Number(value.toPrecision(4)).toLocaleString("en", { maximumSignificantDigits: 4 });
  }

  // Text from data is shown as text: tooltips are HTML.
  function safe(text) {
    return String(text).replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);
  }

  // Values at 1, 2, 5 of each decade, or at decades if there are many.
  function ticks(low, high) {
    const found = [];
    for (let decade = Math.floor(Math.log10(low)); decade <= Math.ceil(Math.log10(high)); decade += 1) {
      for (const step of high / low < 3000 ? [1, 2, 5] : [1]) {
        const value = step * Math.pow(10, decade);
        if (value >= low * 0.999 && value <= high * 1.001) found.push(value);
      }
    }
    return found;
  }

  function axis(given, colours, isX, width) {
    const it = given || {};
    const names = it.names || [];
    return {
      type: names.length ? "category" : it.log ? "log" : "value",
      name: it.title || "",
      nameLocation: isX ? "middle" : it.inverse ? "start" : "end",
      nameGap: isX ? 26 : 10,
      nameTextStyle: { color: colours.soft, align: isX ? "center" : "left" },
      data: names.length ? names : undefined,
      inverse: Boolean(it.inverse),
      min: it.low === undefined ? undefined : it.low,
      max: it.high === undefined ? undefined : it.high,
      scale: Boolean(it.log),
      minInterval: it.whole ? 1 : undefined,
      axisLine: { lineStyle: { color: colours.line } },
      axisTick: { show: false, customValues: it.log ? ticks(it.low, it.high) : undefined },
      axisLabel: {
        color: colours.soft, hideOverlap: true,
        // No label at the ragged ends of a range that is not round.
        showMinLabel: it.low ? false : undefined, showMaxLabel: it.high && !names.length ? false : undefined,
        formatter: names.length ? undefined : short,
        customValues: it.log ? ticks(it.low, it.high) : undefined,
        width: isX ? undefined : width < 500 ? 112 : 200,
        // Names of rows: two lines of a narrow page, where a number has one.
        overflow: names.length && !isX && width < 500 ? "break" : "truncate",
        fontSize: names.length && !isX && width < 500 ? 10 : 12, lineHeight: names.length && !isX ? 11 : undefined,
      },
      splitLine: { show: !names.length, lineStyle: { color: colours.line, opacity: 0.6 } },
      splitNumber: isX && width < 500 ? 4 : 5,
    };
  }

  function lineOf(one, chart, colours, width) {
    const isPoints = one.shape === "points";
    const data = one.x.map((x, i) => one.sums ? [x, one.sums[i], one.y[i]] : [x, one.y[i]]);
    const color = one.color === "text" ? colours.text : one.color;
    const made = {
      type: isPoints ? "scatter" : one.shape === "bar" ? "bar" : "line",
      name: one.name || "",
      data,
      yAxisIndex: one.right ? 1 : 0,
      itemStyle: { color },
    };
    if (isPoints) {
      made.symbol = symbols[one.symbol || "circle"];
      made.symbolSize = one.size || 8;
      if (one.labels) {
        made.label = { show: true, position: "right", color: colours.soft, fontSize: 11, formatter: (p) => one.labels[p.dataIndex] };
        // At the right edge a label stands to the left of its point.
        made.labelLayout = ({ rect, labelRect }) =>
          labelRect.x + labelRect.width > width - 8
            ? { hideOverlap: true, align: "right", x: rect.x - 4 }
            : { hideOverlap: true };
      }
    } else if (one.shape === "bar") {
      made.stack = "all";
      made.barCategoryGap = "25%";
      const values = one.y;
      made.data = chart.x.names ? values : one.x;  // vertical or horizontal
    } else {
      made.showSymbol = one.shape === "linepoints";
      made.symbolSize = 6;
      made.step = { after: "end", before: "start" }[one.shape] || false;
      made.lineStyle = { width: one.area ? 0 : one.width || 1.5, color, type: one.dash ? "dashed" : "solid" };
      if (one.area) made.areaStyle = { color: one.color, opacity: 1 };
    }
    return made;
  }

  // Areas stand on each other: each is drawn from the ground to its sum, the last sum first.
  function stacked(all) {
    const sums = [];
    all.filter((one) => one.area).forEach((one, order) => {
      one.y.forEach((value, i) => { sums[i] = (sums[i] || 0) + value; });
      one.sums = sums.slice();
      one.order = order;
    });
  }

  // A band between two curves: the lower one unseen, the difference stacked on it.
  function bandOf(one) {
    const common = { type: "line", symbol: "none", silent: true, stack: `band ${one.name}`, lineStyle: { width: 0 }, tooltip: { show: false } };
    return [
      { ...common, data: one.x.map((x, i) => [x, one.low[i]]) },
      { ...common, data: one.x.map((x, i) => [x, one.high[i] - one.low[i]]), areaStyle: { color: one.color, opacity: 0.2 } },
    ];
  }

  function colourAt(part) {
    const scale = dark.matches ? scales.dark : scales.light;
    const at = Math.max(0, Math.min(1, part)) * (scale.length - 1);
    const low = Math.floor(at), high = Math.min(low + 1, scale.length - 1), rest = at - low;
    const mix = [1, 3, 5].map((i) => {
      const a = parseInt(scale[low].slice(i, i + 2), 16), b = parseInt(scale[high].slice(i, i + 2), 16);
      return Math.round(a + (b - a) * rest);
    });
    return `rgb(${mix})`;
  }

  function heatOf(heat, hasRows) {
    return {
      type: "custom", name: heat.unit, heat, clip: true, progressive: 0,
      encode: { x: [0, 1], y: hasRows ? 2 : [2, 3] },
      data: heat.cells.map(([i, j, v]) => hasRows
        ? [heat.x[i], heat.x[i + 1], j, j, v]
        : [heat.x[i], heat.x[i + 1], heat.y[j], heat.y[j + 1], v]),
      renderItem: (params, api) => {
        const a = api.coord([api.value(0), api.value(2)]), b = api.coord([api.value(1), api.value(3)]);
        const step = hasRows ? Math.max(api.size([0, 1])[1] - 1, 1) : 0;
        const rect = hasRows
          ? { x: a[0], y: a[1] - step / 2, width: Math.max(b[0] - a[0], 0.7), height: step }
          : { x: a[0], y: b[1], width: Math.max(b[0] - a[0], 0.7), height: Math.max(a[1] - b[1], 0.7) };
        return { type: "rect", shape: rect, style: { fill: colourAt(api.value(4) / heat.top) } };
      },
    };
  }

  function spansOf(spans) {
    return spans.kinds.map((kind, k) => ({
      type: "custom", name: kind.name, spans, clip: true, itemStyle: { color: kind.color }, progressive: 0,
      encode: { x: [0, 1], y: 2 },
      data: spans.rows.filter((row) => row[3] === k).map((row) => [row[0], row[1], row[2], row[4]]),
      renderItem: (params, api) => {
        const a = api.coord([api.value(0), api.value(2)]), b = api.coord([api.value(1), api.value(2)]);
        const height = Math.max(api.size([0, 1])[1] * 0.8, 1);
        return {
          type: "rect", style: { fill: kind.color },
          shape: { x: a[0], y: a[1] - height / 2, width: Math.max(b[0] - a[0], 0.7), height },
        };
      },
    }));
  }

  function limitsOf(chart, colours) {
    const lines = (chart.limits || []).map((limit) => ({
      [limit.axis === "y" ? "yAxis" : "xAxis"]: limit.value,
      label: { formatter: limit.text, color: colours.poor, position: limit.axis === "y" ? "insideEndTop" : "insideEndBottom" },
    }));
    for (const mark of chart.marks || []) {
      lines.push({ xAxis: mark.x, label: { show: false }, lineStyle: { color: mark.color, type: "solid", width: 1 } });
    }
    const areas = (chart.regions || []).map((region) => [
      { name: region.text, xAxis: region.x_low, yAxis: region.y_low },
      { xAxis: region.x_high, yAxis: region.y_high },
    ]);
    return {
      type: "line", data: [], silent: true, tooltip: { show: false },
      markLine: { symbol: "none", silent: true, data: lines, lineStyle: { color: colours.poor, type: "dashed", width: 1.5 } },
      markArea: { silent: true, data: areas, itemStyle: { color: "rgba(26,127,75,0.14)" }, label: { color: colours.soft, position: "insideBottomLeft" } },
    };
  }

  function tip(chart, plain, offset) {
    const x = (value) => `${short(value)}${chart.x.unit ? " " + chart.x.unit : ""}`;
    const item = (p) => {
      if (p.seriesType === "custom") {
        const series = p.data;
        if (chart.spans && chart.spans.kinds.some((kind) => kind.name === p.seriesName)) {
          const row = chart.y.names[series[2]];
          return safe(`${chart.row || "row"} ${row}: ${p.seriesName}`) + `<br>${x(series[0])} to ${x(series[1])}<br>` + safe(chart.spans.texts[series[3]]);
        }
        const where = chart.y.names ? `${chart.row || "row"} ${chart.y.names[series[2]]}` : `${short(series[2])} to ${short(series[3])} ${chart.y.unit || ""}`;
        return safe(`${x(series[0])}, ${where}: ${short(series[4])} ${chart.heat.unit}`);
      }
      const own = plain[p.seriesIndex - offset] || {};
      const said = own.text && own.text[p.dataIndex];
      if (said) return safe(said).replace(/\n/g, "<br>") + (chart.y.names ? `<br>${x(p.value[0])}` : `<br>${x(p.value[0])}: ${short(p.value[1])}`);
      if (p.seriesType === "bar") return safe(`${p.name}${own.name ? ", " + p.seriesName : ""}: ${short(Array.isArray(p.value) ? p.value[0] : p.value)} ${chart.x.unit || ""}`);
      return safe(`${p.seriesName} ${x(p.value[0])}: ${short(p.value[1])} ${chart.y.unit || ""}`);
    };
    const isTimeline = Boolean(chart.spans || chart.heat);
    const isBars = (chart.series || []).some((one) => one.shape === "bar");
    const isPoints = (chart.series || []).some((one) => one.shape === "points");
    if (isTimeline || isPoints || isBars) return { trigger: "item", formatter: (p) => item(p) };
    return {
      trigger: "axis",
      formatter: (all) => {
        const seen = all.filter((p) => p.seriesName && !p.seriesName.startsWith("series\u0000"));
        if (!seen.length) return "";
        const at = seen[0].value[0], near = (chart.x.high - chart.x.low) / 100;
        const marks = (chart.marks || []).filter((mark) => Math.abs(mark.x - at) <= near).slice(-4);
        return x(at) + marks.map((mark) => "<br>" + safe(mark.text)).join("") + seen.map((p) => `<br>${p.marker}${safe(p.seriesName)} ${short(p.value[p.value.length - 1])} ${safe(chart.series.find((s) => s.name === p.seriesName && s.right) ? chart.y2.unit || "" : chart.y.unit || "")}`).join("");
      },
    };
  }

  function optionOf(chart, colours, width) {
    const plain = (chart.series || []).filter((one) => !one.stat || one.stat === stat());
    const series = [
      ...(chart.heat ? [heatOf(chart.heat, Boolean(chart.y.names))] : []),
      ...(chart.spans ? spansOf(chart.spans) : []),
    ];
    const offset = series.length;
    stacked(plain);
    for (const one of plain) series.push({ ...lineOf(one, chart, colours, width), z: one.sums ? 3 - one.order / 100 : 4 });
    const shown = series.map((one) => one.name).filter((name, i) => name && !series[i].heat);
    for (const one of plain) if (one.low) series.push(...bandOf(one));
    if ([chart.limits, chart.regions, chart.marks].some((all) => (all || []).length)) series.push(limitsOf(chart, colours));
    const hasLegend = shown.length > 1 || Boolean(chart.legend);
    const zoom = chart.time
      ? [{ type: "inside", xAxisIndex: 0, filterMode: "none", zoomOnMouseWheel: "ctrl", moveOnMouseMove: true, moveOnMouseWheel: false, preventDefaultMouseMove: false }]
      : [];
    if (chart.slider) zoom.push({ type: "slider", xAxisIndex: 0, filterMode: "none", height: 16, bottom: 4, borderColor: colours.line, textStyle: { color: colours.soft }, labelFormatter: (value) => short(value) });
    return {
      animation: false,
      textStyle: { fontFamily: "system-ui, sans-serif", color: colours.text },
      aria: { enabled: false },
      grid: { left: chart.y && chart.y.names ? 16 : 8, right: chart.y2 ? 8 : 18, top: hasLegend ? 48 : 26, bottom: chart.slider ? 52 : 26, containLabel: true, show: Boolean(chart.back), backgroundColor: chart.back ? colours.line : "transparent", borderWidth: 0 },
      legend: hasLegend ? { type: "scroll", top: 0, left: 0, right: 8, data: shown, itemWidth: 14, itemHeight: 10, textStyle: { color: colours.soft }, pageTextStyle: { color: colours.soft }, pageIconColor: colours.text, pageIconInactiveColor: colours.line } : undefined,
      tooltip: { ...tip(chart, plain, offset), confine: true, backgroundColor: colours.card, borderColor: colours.line, textStyle: { color: colours.text, fontSize: 12 } },
      xAxis: { ...axis(chart.x, colours, true, width), axisPointer: { show: Boolean(chart.time), label: { show: false }, lineStyle: { color: colours.soft } } },
      yAxis: [axis(chart.y, colours, false, width), ...(chart.y2 ? [{ ...axis(chart.y2, colours, false, width), splitLine: { show: false }, nameTextStyle: { color: colours.soft, align: "right" } }] : [])],
      dataZoom: zoom,
      series,
    };
  }

  function stat() {
    const chosen = document.getElementById("statistic");
    return chosen ? chosen.value : "p99";
  }

  function draw(chart) {
    const place = document.getElementById(chart.id);
    if (!place) return;
    let instance = drawn.get(chart.id);
    if (!instance) {
      instance = echarts.init(place, null, { renderer: "canvas" });
      drawn.set(chart.id, instance);
      if (chart.time) instance.group = "time";
    }
    const zoom = chart.time ? zoomOfOthers(chart.id) : null;
    instance.setOption(optionOf(chart, theme(), place.clientWidth), { notMerge: true, silent: true });
    if (zoom) instance.dispatchAction({ type: "dataZoom", dataZoomIndex: 0, ...zoom, escapeConnect: true });
  }

  // A chart with a time axis that is drawn late, or again, shows the time that the others show.
  function zoomOfOthers(id) {
    for (const [other, instance] of drawn) {
      const zoom = other !== id && instance.group === "time" && (instance.getOption() || {}).dataZoom;
      if (zoom && zoom[0] && (zoom[0].start > 0 || zoom[0].end < 100)) return { start: zoom[0].start, end: zoom[0].end };
    }
    return null;
  }

  // A chart costs the browser some 50 ms: each is drawn when it comes near the screen, all before printing.
  function drawInTime(charts) {
    const root = document.documentElement, waiting = new Map();
    const show = (chart) => {
      waiting.delete(chart.id);
      draw(chart);
      root.dataset.drawn = String(drawn.size);
    };
    const watcher = new IntersectionObserver((seen) => {
      for (const one of seen) {
        if (one.isIntersecting) { watcher.unobserve(one.target); if (waiting.has(one.target.id)) show(waiting.get(one.target.id)); }
      }
      root.dataset.drawn = String(drawn.size);
    }, { rootMargin: "400px 0px" });
    for (const chart of charts) {
      const place = document.getElementById(chart.id);
      if (!place) continue;
      waiting.set(chart.id, chart);
      watcher.observe(place);
    }
    echarts.connect("time");
    window.addEventListener("beforeprint", () => [...waiting.values()].forEach(show));
    if (!waiting.size) root.dataset.drawn = "0";
  }

  // A chart has the focus: arrows pan, plus and minus zoom, 0 shows everything again.
  function keys(charts) {
    document.addEventListener("keydown", (event) => {
      const place = event.target.closest && event.target.closest(".chart");
      const instance = place && drawn.get(place.id);
      const chart = instance && charts.find((one) => one.id === place.id);
      if (!chart || !chart.time || event.ctrlKey || event.metaKey || event.altKey) return;
      const zoom = instance.getOption().dataZoom[0];
      const middle = (zoom.start + zoom.end) / 2, half = (zoom.end - zoom.start) / 2;
      const moves = {
        ArrowLeft: [zoom.start - half / 2, zoom.end - half / 2],
        ArrowRight: [zoom.start + half / 2, zoom.end + half / 2],
        "+": [middle - half / 1.5, middle + half / 1.5],
        "-": [middle - half * 1.5, middle + half * 1.5],
        0: [0, 100],
      };
      if (!moves[event.key]) return;
      const [start, end] = moves[event.key];
      instance.dispatchAction({ type: "dataZoom", dataZoomIndex: 0, start: Math.max(0, start), end: Math.min(100, end) });
      event.preventDefault();
    });
  }

  function start(charts) {
    drawInTime(charts);
    keys(charts);
    const again = (some) => some.filter((chart) => drawn.has(chart.id)).forEach(draw);
    dark.addEventListener("change", () => again(charts));
    let pending = 0;
    window.addEventListener("resize", () => {
      clearTimeout(pending);
      pending = setTimeout(resize, 80);
    });
    const chosen = document.getElementById("statistic");
    if (chosen) chosen.addEventListener("change", () => {
      for (const cell of document.querySelectorAll("[data-stats]")) {
        cell.textContent = JSON.parse(cell.dataset.stats)[chosen.value] || cell.textContent;
      }
      again(charts.filter((chart) => (chart.series || []).some((one) => one.stat)));
    });
  }

  // The value of the x axis at so many pixels from the left of a chart.
  function valueAt(id, pixels) { return drawn.get(id).convertFromPixel({ xAxisIndex: 0 }, pixels); }

  function resize() { drawn.forEach((instance) => instance.resize()); }

  return { start, draw, resize, theme, short, valueAt };
})();
if (document.getElementById("figures")) {
  emuCharts.start(JSON.parse(document.getElementById("figures").textContent));
}
