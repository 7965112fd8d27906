"use strict";
// Draws every chart of the page with Chart.js, in the page's colours, and again where light turns dark.
// A chart can be read without a pointer: left and right arrows move along it, and what is there is said below it.

const UNITS = {
  ratio: (value) => (100 * value).toFixed(1) + "%",
  count: (value) => Math.round(value).toLocaleString("en"),
  milliseconds: (value) => (value < 10 ? value.toFixed(1) : Math.round(value).toLocaleString("en")) + " ms",
};

const TICKS = { ...UNITS, ratio: (value) => Math.round(100 * value) + "%", milliseconds: (value) => UNITS.count(value) + " ms" };

const BAR_HEIGHT_PX = 44;
const TICKS_MAX = 6;
const NARROW_PX = 560;
const LINE_CHARACTERS = 20;
const WORD_PART = new RegExp(".{1," + LINE_CHARACTERS + "}", "g");

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
}

function allSeries(chart) {
  return chart.kind === "bands" ? [...chart.bands, chart.bound] : chart.parts;
}

function placesOf(chart) {
  return chart.position_labels.length ? chart.positions.map((_, at) => at) : chart.positions;
}

function datasetsOf(chart) {
  if (chart.kind === "bars") {
    return chart.parts.map((part) => ({ label: part.name, data: part.values, backgroundColor: colour(part.name) }));
  }
  const bands = chart.bands.map((band, number) => ({
    label: band.name,
    data: placesOf(chart).map((x, at) => ({ x, y: band.values[at] })),
    backgroundColor: colour(band.name),
    borderWidth: 0,
    pointRadius: (point) => (number === chart.bands.length - 1 && chart.marked.includes(point.dataIndex) ? 6 : 0),
    pointBackgroundColor: colour("ground"),
    pointBorderColor: colour("ink"),
    pointBorderWidth: 2.5,
    clip: false,
    fill: number ? "-1" : "origin",
    stack: "bands",
  }));
  const bound = {
    label: chart.bound.name,
    data: placesOf(chart).map((x, at) => ({ x, y: chart.bound.values[at] })),
    borderColor: colour("ink"),
    borderWidth: 1.5,
    borderDash: [5, 4],
    pointRadius: 0,
    fill: false,
    stack: "bound",
  };
  return [...bands, bound];
}

// Names beside bars take half of a narrow chart at most, and are broken into lines there, or their beginning is cut.
function linesOf(name) {
  const lines = [""];
  for (const word of name.split(" ").flatMap((each) => each.match(WORD_PART) || [])) {
    const line = lines[lines.length - 1];
    if (line && line.length + 1 + word.length > LINE_CHARACTERS) lines.push(word);
    else lines[lines.length - 1] = line ? line + " " + word : word;
  }
  return lines;
}

function titleAt(chart, index) {
  if (chart.kind === "bars") return chart.categories[index];
  const note = chart.position_notes[index];
  const label = chart.position_labels[index] || Math.round(chart.positions[index]).toLocaleString("en");
  return chart.position_name + " " + label + (note ? ", " + note : "");
}

function optionsOf(chart) {
  const isBands = chart.kind === "bands";
  const values = {
    stacked: true,
    beginAtZero: true,
    grid: { color: colour("rule") },
    border: { display: false },
    ticks: { color: colour("soft"), callback: (value) => TICKS[chart.unit](value), maxTicksLimit: TICKS_MAX + 1, maxRotation: 0 },
  };
  const positions = {
    stacked: !isBands,
    grid: { display: false },
    border: { color: colour("rule") },
    ticks: { color: colour(isBands ? "soft" : "ink"), maxRotation: 0, autoSkipPadding: 20 },
  };
  if (!isBands) {
    positions.ticks.callback = function (value) {
      const name = this.getLabelForValue(value);
      return this.chart.width < NARROW_PX ? linesOf(name) : name;
    };
  }
  if (isBands) {
    positions.type = "linear";
    const places = placesOf(chart);
    positions.min = places[0];
    positions.max = places[places.length - 1];
    if (chart.position_labels.length) {
      positions.ticks.stepSize = 1;
      positions.ticks.callback = (value) => chart.position_labels[value];
    }
    positions.title = { display: true, text: chart.position_name, color: colour("soft") };
  }
  return {
    animation: false,
    responsive: true,
    maintainAspectRatio: false,
    indexAxis: isBands ? "x" : "y",
    interaction: { mode: "index", axis: isBands ? "x" : "y", intersect: false },
    scales: isBands ? { x: positions, y: values } : { x: values, y: positions },
    plugins: {
      legend: { display: false },
      tooltip: {
        callbacks: {
          title: (items) => titleAt(chart, items[0].dataIndex),
          label: (item) => " " + item.dataset.label + "  " + UNITS[chart.unit](allSeries(chart)[item.datasetIndex].values[item.dataIndex]),
        },
      },
    },
  };
}

function addLegend(section, chart, drawn) {
  const legend = section.querySelector(".legend");
  if (allSeries(chart).length < 2) return;
  allSeries(chart).forEach((series, number) => {
    const button = document.createElement("button");
    const mark = document.createElement("i");
    const isBound = chart.kind === "bands" && series === chart.bound;
    mark.className = isBound ? "line" : "";
    if (!isBound) mark.style.background = "var(--" + series.name + ")";
    button.type = "button";
    button.setAttribute("aria-pressed", "true");
    button.append(mark, series.name);
    button.addEventListener("click", () => {
      const isShown = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(isShown));
      drawn.setDatasetVisibility(number, isShown);
      drawn.update();
    });
    legend.append(button);
  });
}

function addKeys(section, chart, drawn) {
  const canvas = section.querySelector("canvas");
  const count = chart.kind === "bands" ? chart.positions.length : chart.categories.length;
  let at = -1;
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    at = Math.min(count - 1, Math.max(0, at + step));
    const active = allSeries(chart).map((_, datasetIndex) => ({ datasetIndex, index: at }));
    const shown = active.filter((each) => drawn.isDatasetVisible(each.datasetIndex));
    drawn.tooltip.setActiveElements(shown, drawn.getDatasetMeta(0).data[at].getCenterPoint());
    drawn.update();
    const said = allSeries(chart).map((series) => series.name + " " + UNITS[chart.unit](series.values[at]));
    section.querySelector(".reading").textContent = titleAt(chart, at) + ": " + said.join(", ");
  });
}

function drawAll() {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const drawn = [...document.querySelectorAll("[data-chart]")].map((section) => {
    const chart = charts[Number(section.dataset.chart)];
    const plot = section.querySelector(".plot");
    if (chart.kind === "bars") {
      plot.classList.add("bars");
      plot.style.height = 40 + BAR_HEIGHT_PX * chart.categories.length + "px";
    }
    const type = chart.kind === "bands" ? "line" : "bar";
    const config = { type, data: { labels: chart.categories, datasets: datasetsOf(chart) }, options: optionsOf(chart) };
    const figure = new Chart(section.querySelector("canvas"), config);
    addLegend(section, chart, figure);
    addKeys(section, chart, figure);
    section.dataset.isDrawn = "true";
    return [chart, figure];
  });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const [chart, figure] of drawn) {
      datasetsOf(chart).forEach((dataset, number) => Object.assign(figure.data.datasets[number], dataset));
      figure.options = optionsOf(chart);
      figure.update();
    }
  });
}

Chart.defaults.font.family = "system-ui, sans-serif";
drawAll();
