"use strict";
// Draws what the page carries: unpacks the figures and plotly, then fills each .plot. State that a reader would miss after the page is
// read again (axis, theme, hidden runs, sorting) is kept in the session.

const state = Object.assign({ axis: "steps", smooth: true, hidden: [], measure: "underflow", heatRun: null, sort: null, zoom: null }, kept());
let data;

function kept() {
  try { return JSON.parse(sessionStorage.getItem("report" + location.pathname)) || {}; } catch { return {}; }
}
function keep() {
  try { sessionStorage.setItem("report" + location.pathname, JSON.stringify(state)); } catch {}
}
const find = (id) => document.getElementById(id);
const all = (selector) => [...document.querySelectorAll(selector)];
const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const narrow = () => window.innerWidth < 760;
const shown = (index) => !state.hidden.includes(index);
const digitsOf = (...values) => (values.some((v) => v && Math.abs(v) < 1e-4) ? 5 : 4);  // as many of a value and of its error
const signed = (value, digits = digitsOf(value)) => (Math.abs(value) < 5e-6 ? "0" : (value >= 0 ? "+" : "−") + Math.abs(value).toFixed(digits));

// ── Unpacking ────────────────────────────────────────────────────────────────────────────────────────────────────────────────

async function unpack(id) {
  if (typeof DecompressionStream === "undefined") throw new Error("This browser is too old to unpack the figures (it has no DecompressionStream); the table above is whole.");
  const bytes = Uint8Array.from(atob(find(id).textContent), (c) => c.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

async function start() {
  markTheme();
  makeSortable();
  try {
    const [figures, library] = await Promise.all([unpack("data"), unpack("library")]);
    data = JSON.parse(figures);
    const script = document.createElement("script");
    script.textContent = library;
    document.head.append(script);
  } catch (error) {
    find("failure").textContent = "The pictures cannot be drawn: " + error.message;
    return;
  }
  state.hidden = state.hidden.filter((index) => index < data.runs.length);
  if (!data.axes[state.axis]) state.axis = "steps";
  all("[data-swatch]").forEach((place) => { place.innerHTML = swatch(runOf(place)); });
  listen();
  try {
    drawAll();
  } catch (error) {
    find("failure").textContent = "Not all pictures can be drawn: " + error.message;
    throw error;
  }
  document.documentElement.dataset.drawn = "yes";
  if (data.every) setTimeout(() => location.reload(), data.every * 1000);
}

function runOf(place) {
  const holder = place.closest("[data-run], [data-toggle]");
  return data.runs[holder.dataset.run ?? holder.dataset.toggle];
}

function swatch(run) {
  const dashes = { solid: "", dash: "6 3", dot: "2 2.5", dashdot: "6 2.5 1.5 2.5" };
  return `<svg class="swatch" width="24" height="12" aria-hidden="true"><line x1="0" y1="6" x2="24" y2="6" stroke="${run.colour}" stroke-width="2.6" stroke-dasharray="${dashes[run.dash]}"/>${mark(run)}</svg> `;
}
function mark(run) {
  const shapes = {
    circle: '<circle cx="12" cy="6" r="4"/>', square: '<rect x="8" y="2" width="8" height="8"/>',
    diamond: '<path d="M12 1l5 5-5 5-5-5z"/>', "triangle-up": '<path d="M12 1.5l5 9H7z"/>',
    cross: '<path d="M10.5 1.5h3v3h3v3h-3v3h-3v-3h-3v-3h3z"/>', star: '<path d="M12 0l1.6 4.2 4.4.2-3.5 2.8 1.2 4.3L12 9l-3.7 2.5 1.2-4.3L6 4.4l4.4-.2z"/>',
  };
  return `<g fill="${run.emulated ? ink("--card") : run.colour}" stroke="${run.colour}" stroke-width="1.5">${shapes[run.symbol]}</g>`;
}

// What ink is read best on a colour, by its luminance (WCAG 2).
function inkOn(colour) {
  const parts = [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16) / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
  return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2] > 0.21 ? "#1d2125" : "#fff";
}

// ── Look ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────

function markTheme() {
  let kept = null;
  try { kept = localStorage.getItem("report-theme"); } catch {}
  all("[data-theme-of]").forEach((b) => b.setAttribute("aria-pressed", String((kept || "") === b.dataset.themeOf)));
}
function chooseTheme(name) {
  try { name ? localStorage.setItem("report-theme", name) : localStorage.removeItem("report-theme"); } catch {}
  const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  document.documentElement.dataset.theme = name || system;
  markTheme();
  if (data) {
    all("[data-swatch]").forEach((place) => { place.innerHTML = swatch(runOf(place)); });
    drawAll();
  }
}

const axis = (title, more = {}) => ({
  title: { text: title, standoff: 8, font: { size: 12, color: ink("--soft") } }, gridcolor: ink("--line"), zerolinecolor: ink("--line"),
  linecolor: ink("--line"), tickfont: { size: 11, color: ink("--soft") }, automargin: true, exponentformat: "none", ...more,
});
function layout(more) {
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, margin: { l: 8, r: 12, t: 8, b: 8 },
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: ink("--ink") }, hovermode: "closest",
    dragmode: narrow() ? false : "zoom",  // on a phone a finger scrolls the page
    hoverlabel: { bgcolor: ink("--card"), bordercolor: ink("--line"), font: { color: ink("--ink"), size: 12 }, align: "left" }, ...more,
  };
}
const config = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };
const draw = (id, traces, more) => Plotly.react(find(id), traces, layout(more), { ...config, displayModeBar: narrow() ? false : "hover" });

// ── An axis that is linear around zero and logarithmic beyond ────────────────────────────────────────────────────────────────

// Where some runs differ by tens of times what others do: linear within the threshold, a power of ten a unit beyond it.
function symlog(values, noise) {
  const sizes = values.map(Math.abs).filter((v) => v > 0).sort((a, b) => a - b);
  if (sizes.length < 2 || sizes.at(-1) < 20 * sizes[0]) return null;
  const threshold = 10 ** Math.ceil(Math.log10(noise > 0 ? noise : sizes[0]));
  if (sizes.at(-1) < 3 * threshold) return null;
  const to = (v) => (v === null ? null : Math.abs(v) <= threshold ? v / threshold : Math.sign(v) * (1 + Math.log10(Math.abs(v) / threshold)));
  const ticks = [0];
  for (let size = threshold; size < 1e4; size *= 10) ticks.push(size, -size);
  return { to, threshold, tickvals: ticks.map(to), ticktext: ticks.map((v) => (v ? signed(v, Math.max(0, -Math.floor(Math.log10(Math.abs(v)) + 1e-9))) : "0")) };
}
const plain = { to: (v) => v };
const ticksOf = (scale) => (scale.tickvals ? { tickvals: scale.tickvals, ticktext: scale.ticktext } : {});
const saidOf = (scale) => (scale.threshold ? `Scale: linear up to ±${scale.threshold}, logarithmic beyond.` : "");

// ── The two pictures at the top ──────────────────────────────────────────────────────────────────────────────────────────────

function scatter(id, rows, front, height = narrow() ? 290 : 380) {
  const names = !narrow() && rows.length <= 9;
  const traces = [];
  if (front.length > 1) {
    front.sort((a, b) => a.speed - b.speed);
    traces.push({ x: front.map((r) => r.speed), y: front.map((r) => r.loss), mode: "lines", line: { color: ink("--soft"), width: 1.5, dash: "dot" }, hoverinfo: "skip" });
  }
  rows.forEach((run) => traces.push({
    x: [run.speed], y: [run.loss], mode: names ? "markers+text" : "markers", text: [run.name], textposition: "top center", textfont: { size: 11, color: ink("--soft") },
    name: run.name, cliponaxis: false,
    marker: { color: run.emulated ? ink("--card") : run.colour, symbol: run.symbol, size: run.front ? 14 : 11, line: { color: run.colour, width: 2 } },
    hovertemplate: `<b>${run.name}</b><br>%{x:,.0f} tokens/s${run.emulated ? ", emulated" : ""}<br>loss %{y:.4f}<extra></extra>`,
  }));
  const pad = (values, by) => { const lo = Math.min(...values), hi = Math.max(...values), m = (hi - lo || Math.abs(hi) || 1) * by; return [lo - m, hi + m]; };
  draw(id, traces, {
    height,
    xaxis: axis("tokens/s", { range: pad(rows.map((r) => r.speed), names ? 0.18 : 0.08), tickformat: "~s", nticks: 6 }),
    yaxis: axis("loss, nats a token", { range: pad(rows.map((r) => r.loss), 0.12) }),
  });
}

function drawSpeed() {
  if (!find("speed")) return;
  const rows = data.runs.filter((run) => run.speed !== null && run.loss !== null && !run.broken);
  markKey("speed-key", rows);
  if (rows.length) scatter("speed", rows, rows.filter((run) => run.front), narrow() ? 290 : endsHeight(data.runs.length));
}
// What the points are: each run where these are few or of one precision; else colours and shapes, each by itself.
function markKey(id, rows) {
  const one = (key) => [...new Map(rows.map((run) => [run[key], run])).values()], hues = one("precision"), kinds = one("kind");
  const entry = (sign, text) => { const span = document.createElement("span"); span.innerHTML = sign; span.append(text); return span; };
  const shape = (run) => `<svg class="swatch" width="18" height="12" viewBox="3 0 18 12" aria-hidden="true">${mark(run)}</svg> `;
  find(id).replaceChildren(...(rows.length <= 9 || hues.length === 1 ? rows.map((run) => entry(shape(run), run.name)) : [
    ...hues.map((run) => entry(`<i style="background: ${run.hue}"></i>`, run.precision)),
    ...(kinds.length > 1 ? kinds.map((run) => entry(shape({ symbol: run.symbol, colour: ink("--soft") }), run.kind || "no other difference")) : []),
  ]));
}

const endsHeight = (runs) => Math.max(narrow() ? 150 : find("speed") ? 320 : 170, 70 + 23 * runs);
function drawEnds() {
  if (!find("ends")) return;
  const paired = data.runs.some((run) => run.gap !== null);
  const rows = data.runs.filter((run) => !run.broken && (paired ? run.gap !== null || run.baseline : run.loss !== null));
  find("ends").hidden = !rows.length;  // what broke off has no end, and is named below
  if (!rows.length) return;
  const order = [...rows].sort((a, b) => (paired ? b.baseline - a.baseline || a.place - b.place : a.loss - b.loss));
  const value = (run) => (paired ? (run.baseline ? 0 : run.gap) : run.loss);
  const noise = Math.min(...rows.filter((r) => r.half).map((r) => r.half));
  const scale = (paired && symlog(rows.map(value), Number.isFinite(noise) ? noise : 0)) || plain;
  const bar = (run, side) => (run.half ? Math.abs(scale.to(run.gap + side * run.half) - scale.to(run.gap)) : 0);
  const traces = order.map((run) => ({
    x: [scale.to(value(run))], y: [run.name], mode: "markers", cliponaxis: false,
    marker: { color: run.emulated ? ink("--card") : run.colour, symbol: run.symbol, size: 10, line: { color: run.colour, width: 2 } },
    error_x: { type: "data", symmetric: false, array: [bar(run, 1)], arrayminus: [bar(run, -1)], color: run.colour, thickness: 1.6, width: 4, visible: Boolean(run.half) },
    hovertemplate: `<b>${run.name}</b>${run.kind ? "<br>" + run.kind : ""}<br>` + (!paired ? `loss ${run.loss.toFixed(4)}` : run.baseline ? "the baseline" : `${signed(run.gap, digitsOf(run.gap, run.half))}${run.half ? " ± " + run.half.toFixed(digitsOf(run.gap, run.half)) : ""}, last ${run.gapSteps} step${run.gapSteps === 1 ? "" : "s"}`) + "<extra></extra>",
  }));
  const low = Math.min(...order.map((r) => scale.to(value(r)) - bar(r, -1))), high = Math.max(...order.map((r) => scale.to(value(r)) + bar(r, 1)));
  const margin = 0.06 * (high - low) || 0.01;
  const words = (run) => (run.baseline ? "baseline" : paired ? signed(run.gap) : run.loss.toFixed(4));
  draw("ends", traces, {
    height: endsHeight(order.length), margin: { l: 8, r: 74, t: 8, b: 8 },
    xaxis: axis(paired ? "nats a token above the baseline" : "loss, nats a token", { range: [low - margin, high + margin], zerolinecolor: ink("--soft"), ...ticksOf(scale) }),
    yaxis: axis("", { autorange: "reversed", type: "category", tickfont: { size: 11, color: ink("--ink") }, tickmode: "array", tickvals: order.map((r) => r.name), ticktext: order.map((r) => shorten(r.name, narrow() ? 18 : 40)) }),
    shapes: paired ? [{ type: "rect", xref: "x", yref: "paper", x0: scale.to(-data.tolerance), x1: scale.to(data.tolerance), y0: 0, y1: 1, fillcolor: ink("--line"), opacity: 0.45, line: { width: 0 }, layer: "below" }] : [],
    annotations: order.map((run) => ({ xref: "paper", x: 1, y: run.name, xanchor: "left", xshift: 8, showarrow: false, text: words(run), font: { size: 11, color: ink("--soft") } })),
  });
  find("ends-scale").textContent = saidOf(scale);
}
const shorten = (text, most) => (text.length > most ? text.slice(0, most - 1) + "…" : text);

// ── Curves ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────

const PANELS = {
  loss: { title: "nats a token", height: 360, fall: true },
  "held-out": { heldOut: true, title: "nats a token", height: 280 },
  minus: { minus: true, title: "nats a token", height: 360 },
  norm: { title: "norm", height: 230, log: true },
  rate: { title: "rate", height: 200, exact: true },
  frozen: { title: "share", height: 230, log: true, percent: true },
};
const POWERS = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1];
const UNITS = { steps: "step", tokens: "tokens", hours: "hours in steps" };

function smooth(values, window) {
  if (window < 2) return values;
  const half = (window - 1) / 2, sums = [0], counts = [0];
  values.forEach((v, i) => { sums.push(sums[i] + (v ?? 0)); counts.push(counts[i] + (v === null ? 0 : 1)); });
  return values.map((_, i) => {
    const from = Math.max(0, i - half), to = Math.min(values.length, i + half + 1), n = counts[to] - counts[from];
    return n ? (sums[to] - sums[from]) / n : null;
  });
}
const quantile = (sorted, share) => sorted[Math.min(sorted.length - 1, Math.max(0, Math.round(share * (sorted.length - 1))))];

function lineOf(run, x, y, text, more = {}) {
  return { x, y, mode: "lines", line: { color: run.colour, dash: run.dash, width: run.baseline ? 2.4 : 1.8 }, name: run.name, connectgaps: false, customdata: text,
    hovertemplate: `<b>${run.name}</b><br>${UNITS[state.axis]} %{x}<br>%{customdata}<extra></extra>`, ...more };
}

function drawCurve(id) {
  const panel = PANELS[id], traces = [], values = [], annotations = [], lines = [];
  const runs = data.runs.filter((run, index) => shown(index) && (!panel.minus || run.minus.at.length || run.baseline));
  let scale = plain, notes = {};
  if (panel.minus) {
    const ended = runs.filter((r) => r.gap !== null), ends = ended.map((r) => r.gap);  // what broke off has no gap
    const spreads = ended.map((r) => spread(r.minus.loss.slice(-Math.max(2, Math.ceil(r.minus.loss.length / 5)))));
    scale = symlog(ends, Math.min(...spreads)) || plain;
  }
  const bands = panel.minus && runs.filter((r) => !r.baseline).length <= 3;
  for (const run of runs) {
    const along = (panel.heldOut ? run.heldOut : run)[state.axis], x = panel.minus ? run.minus.at.map((i) => along[i]) : along;
    if (panel.heldOut) {
      traces.push(lineOf(run, x, run.heldOut.loss, run.heldOut.loss.map((v) => v?.toFixed(4)), { mode: "lines+markers", marker: { symbol: run.symbol, size: 7, color: run.emulated ? ink("--card") : run.colour, line: { color: run.colour, width: 1.5 } } }));
      continue;
    }
    const raw = panel.minus ? run.minus.loss : run.curves[id];
    if (!raw || (panel.minus && run.baseline)) continue;
    const smoothed = state.smooth && !panel.exact ? smooth(raw, panel.minus ? Math.max(run.window, 1) : run.window) : raw;
    if (bands && state.smooth) {
      const wide = Math.max(run.window, 11), mean = smooth(raw, wide), square = smooth(raw.map((v) => (v === null ? null : v * v)), wide);
      const sd = mean.map((m, i) => (m === null ? null : Math.sqrt(Math.max(0, square[i] - m * m))));
      const edge = (side) => smoothed.map((v, i) => (v === null ? null : scale.to(v + side * sd[i])));
      traces.push({ x: [...x, ...[...x].reverse()], y: [...edge(1), ...edge(-1).reverse()], fill: "toself", fillcolor: run.colour + "26", line: { width: 0 }, hoverinfo: "skip", mode: "lines" });
    } else if (state.smooth && run.window > 1 && runs.length <= 2 && !panel.exact && !panel.minus) {
      traces.push({ x, y: raw, mode: "lines", line: { color: run.colour, width: 0.7 }, opacity: 0.3, hoverinfo: "skip" });
    }
    const words = smoothed.map((v) => (v === null ? "" : panel.minus ? signed(v, 5) : panel.percent ? (100 * v).toPrecision(3) + " %" : panel.exact ? v.toPrecision(4) : v.toPrecision(5)));
    if (panel.fall) lines.push(smoothed);
    traces.push(lineOf(run, x, smoothed.map((v) => (panel.log && v !== null && v <= 0 ? null : scale.to(v))), words));
    const from = panel.fall ? Math.floor(raw.length / 30) : panel.minus ? Math.floor(raw.length / 10) : 0;
    for (let i = from; i < smoothed.length; i++) if (smoothed[i] !== null) values.push(scale.to(smoothed[i]));
  }
  values.sort((a, b) => a - b);
  const y = axis(panel.title, { type: panel.log ? "log" : "linear", ...ticksOf(scale) });
  if (panel.exact) Object.assign(y, { rangemode: "tozero", exponentformat: "power" });
  if (panel.log) Object.assign(y, panel.percent ? { tickvals: POWERS, ticktext: POWERS.map((v) => Number((100 * v).toPrecision(2)) + " %") } : { nticks: 6, exponentformat: "power", minor: { showgrid: false } });
  if ((panel.fall || panel.minus) && values.length) {
    let low = quantile(values, 0.0), high = quantile(values, 0.995);
    if (panel.minus) { low = Math.min(quantile(values, 0.003), 0); high = Math.max(high, 0); }
    const margin = 0.07 * (high - low) || 0.01;
    y.range = [low - margin, high + margin];
  }
  if (panel.log && values.length) {  // whole powers of ten where only these have ticks; and never so close that noise fills it
    const lowest = values.find((v) => v > 0), logs = [lowest ?? 1, values.at(-1)].map(Math.log10);
    y.range = panel.percent ? [Math.floor(logs[0] - 0.01), Math.ceil(logs[1] + 0.01)] : [logs[0] - 0.1, logs[1] + 0.1];
  }
  if (panel.fall) {
    saySpread(id, lines, y.range);
    find("cut-off").hidden = !y.range || !lines.some((line) => line.some((v) => v > y.range[1]));
  }
  const wide = !narrow();
  if (panel.minus) {
    y.zeroline = true; y.zerolinecolor = ink("--soft"); y.zerolinewidth = 1.4;
    if (wide && runs.length > 1) endLabels(runs, scale, y.range, panel.height, annotations);
    find("minus-bands").hidden = !bands || !state.smooth;
    find("minus-scale").textContent = saidOf(scale);
    notes.margin = { l: 8, r: wide && annotations.length ? 32 + 6.4 * Math.max(...annotations.map((a) => a.name.length)) : 12, t: 8, b: 8 };
  }
  const more = { range: state.zoom ?? whole(), autorange: false, tickformat: state.axis === "tokens" ? "~s" : undefined };
  draw(id, traces, { height: narrow() ? Math.round(panel.height * 0.78) : panel.height, xaxis: axis(UNITS[state.axis], more), yaxis: y, annotations, ...notes });
}

// The whole of every run: the same in all curves, whose points begin and end elsewhere.
function whole() {
  const along = data.runs.flatMap((run) => [run[state.axis], run.heldOut[state.axis]]).filter((a) => a.length);
  const low = Math.min(...along.map((a) => a[0])), high = Math.max(...along.map((a) => a.at(-1)));
  const margin = 0.012 * (high - low) || 0.5;
  return [low - margin, high + margin];
}

// Says so where lines lie on each other, as a reader would look for those that are missing.
function saySpread(id, lines, range) {
  const place = document.querySelector(`[data-spread="${id}"]`), most = Math.max(0, ...lines.map((line) => line.length)), from = Math.floor(most / 30);
  const held = lines.filter((line) => line.length > from);  // not those that broke off before
  let widest = 0;
  for (let i = from; i < most && held.length > 1; i++) {
    const here = held.map((line) => line[i]).filter((v) => v !== null && v !== undefined);
    if (here.length > 1) widest = Math.max(widest, Math.max(...here) - Math.min(...here));
  }
  const alike = held.length > 1 && range && widest < 0.04 * (range[1] - range[0]);
  const within = widest ? `lie on each other, within ${widest < 1e-4 ? "0.0001" : widest.toFixed(4)}` : "are equal";
  place.textContent = alike ? `${held.length === lines.length ? "All" : "The longer"} ${held.length} lines ${within}.` : "";
}

function spread(values) {
  const known = values.filter((v) => v !== null), mean = known.reduce((a, b) => a + b, 0) / (known.length || 1);
  return Math.sqrt(known.reduce((a, b) => a + (b - mean) ** 2, 0) / (known.length || 1));
}

// Each line's name and its end at the right, in ink beside its colour, as some colours are no ink; moved apart where lines end close to each other.
function endLabels(runs, scale, range, height, annotations) {
  if (!range) return;
  const gap = 13 / (height - 60), place = (v) => Math.min(1, Math.max(0, (scale.to(v) - range[0]) / (range[1] - range[0])));
  const ends = runs.map((r) => ({ at: place(r.baseline ? 0 : r.gap ?? 0), text: r.baseline ? `${r.name}, baseline` : `${r.name} ${signed(r.gap)}`, colour: r.colour })).sort((a, b) => a.at - b.at);
  ends.forEach((end, i) => { if (i) end.at = Math.max(end.at, ends[i - 1].at + gap); });
  for (let i = ends.length - 1, top = 1; i >= 0; i--, top -= gap) ends[i].at = Math.min(ends[i].at, top);
  for (const end of ends) annotations.push({ xref: "paper", yref: "paper", x: 1, y: end.at, xanchor: "left", yanchor: "middle", xshift: 6, showarrow: false, name: end.text, text: `<span style="color: ${end.colour}">■</span> ${end.text}`, font: { size: 11, color: ink("--ink") } });
}

function drawCurves() {
  all("[data-curve]").forEach((place) => drawCurve(place.id));
  all("[data-axis]").forEach((b) => b.setAttribute("aria-pressed", String(b.dataset.axis === state.axis)));
  all("[data-smooth]").forEach((b) => b.setAttribute("aria-pressed", String(Boolean(b.dataset.smooth) === state.smooth)));
  all("[data-toggle]").forEach((b) => b.setAttribute("aria-pressed", String(shown(Number(b.dataset.toggle)))));
}

// One zoom for all curves: what is chosen in one is set in the others.
let following = false;
function follow(source) {
  source.on("plotly_relayout", (change) => {
    if (following) return;
    const from = change["xaxis.range[0]"] ?? change["xaxis.range"]?.[0], to = change["xaxis.range[1]"] ?? change["xaxis.range"]?.[1];
    if (from === undefined && !change["xaxis.autorange"]) return;
    state.zoom = from === undefined || String([from, to]) === String(whole()) ? null : [from, to];
    keep();
    following = true;
    const others = all("[data-curve]").filter((place) => place !== source);
    Promise.all(others.map((place) => Plotly.relayout(place, { "xaxis.range": state.zoom ?? whole() }))).finally(() => { following = false; });
  });
}

// ── Heat maps ────────────────────────────────────────────────────────────────────────────────────────────────────────────────

const ROLES = { input: "inputs", weight: "weights", grad_output: "gradients of outputs" };
function drawHeat() {
  if (!find("heat")) return;
  const select = find("heat-run");
  if (state.heatRun !== null && data.runs[state.heatRun]?.heat) select.value = String(state.heatRun);
  const heat = data.runs[Number(select.value)].heat, share = ["underflow", "saturation"].includes(state.measure);
  const operands = heat.operands, count = operands.length, stacked = narrow();
  const largest = operands.reduce((most, o) => heat.values[state.measure][o].reduce((of, row) => row.reduce((a, v) => (v > a ? v : a), of), most), 0);
  find("heat-note").textContent = share ? (largest ? `The most is ${(100 * largest).toPrecision(2)} %.` : `No ${state.measure} in any layer, in any step that was looked at.`) : "A row is a layer; brighter is larger.";
  const rowHeight = Math.max(5, Math.min(16, 520 / heat.layers.length)), each = rowHeight * heat.layers.length + 20, height = (stacked ? count * (each + 30) : each) + 90;
  const traces = [], extra = { annotations: [] };
  const light = document.documentElement.dataset.theme !== "dark";
  const sequence = share ? [[0, ink("--heat-none")], [0.02, light ? "#fde3b0" : "#4a3217"], [0.35, "#f0852d"], [1, light ? "#7a0f2b" : "#ffd9c2"]] : "Viridis";
  operands.forEach((operand, i) => {
    const n = i ? String(i + 1) : "";
    traces.push({
      type: "heatmap", x: heat.steps.map(String), y: heat.layers, z: heat.values[state.measure][operand].map((row) => row.map((v) => (v === null ? null : share ? 100 * v : v))),
      xaxis: "x" + n, yaxis: "y" + n, coloraxis: "coloraxis", hoverongaps: false,
      hovertemplate: `<b>%{y}</b>, ${ROLES[operand] ?? operand}<br>step %{x}<br>${share ? state.measure + " %{z:.3g} %" : "2^%{z:.2f}"}<extra></extra>`,
    });
    const across = stacked ? [0, 1] : [i / count + (i ? 0.008 : 0), (i + 1) / count - 0.008];
    const gap = 34 / height, down = stacked ? [1 - (i + 1) / count + gap, 1 - i / count - gap * 0.6] : [0, 1];
    extra["xaxis" + n] = axis(stacked && i < count - 1 ? "" : "step", { domain: across, anchor: "y" + n, type: "category", nticks: 8 });
    extra["yaxis" + n] = axis("", { domain: down, anchor: "x" + n, type: "category", autorange: "reversed", showticklabels: stacked || i === 0, tickfont: { size: rowHeight < 9 ? 8 : 10, color: ink("--soft") }, ticks: "", nticks: rowHeight < 9 ? Math.ceil(heat.layers.length / 2) : undefined });
    extra.annotations.push({ xref: "paper", yref: "paper", x: across[0], y: down[1], xanchor: "left", yanchor: "bottom", showarrow: false, text: ROLES[operand] ?? operand, font: { size: 12, color: ink("--ink") } });
  });
  draw("heat", traces, {
    height, ...extra, margin: { l: 8, r: 8, t: 26, b: 8 },
    coloraxis: { colorscale: sequence, cmin: share ? 0 : undefined, cmax: share ? 100 * largest || 1 : undefined, colorbar: { thickness: 10, outlinewidth: 0, ticksuffix: share ? " %" : "", tickprefix: share ? "" : "2^", tickfont: { size: 10, color: ink("--soft") }, orientation: stacked ? "h" : "v", ...(stacked ? { y: -0.02, yanchor: "top" } : {}) } },
  });
  all("[data-measure]").forEach((b) => b.setAttribute("aria-pressed", String(b.dataset.measure === state.measure)));
}

// ── Time and memory ──────────────────────────────────────────────────────────────────────────────────────────────────────────

const PARTS = ["#4C78A8", "#72B7B2", "#EECA3B", "#F58518", "#B279A2", "#9D755D", "#54A24B", "#E45756", "#8CA0B3", "#BAB0AC"];
function bars(id, names, traces, unit, labels = names.map((name) => shorten(name, narrow() ? 18 : 34))) {
  draw(id, traces, {
    height: 62 + 26 * names.length, barmode: "stack", bargap: 0.3,
    xaxis: axis(unit, { rangemode: "tozero" }),
    yaxis: axis("", { autorange: "reversed", type: "category", tickfont: { size: 11, color: ink("--ink") }, tickmode: "array", tickvals: names, ticktext: labels }),
  });
}
function nameKey(id, parts) {  // names come from files of runs: they are text, never markup
  find(id).replaceChildren(...parts.map((part, i) => {
    const entry = document.createElement("span"), colour = document.createElement("i");
    colour.style.background = PARTS[i % PARTS.length];
    entry.append(colour, part);
    return entry;
  }));
}

// Two bars a run where its parts are known: what was measured, and pale what was planned.
function drawMemoryParts(rows) {
  const kinds = [["measured", 0.95, ""], ["planned", 0.45, ", planned"]];
  const found = new Set(kinds.flatMap(([kind]) => rows.flatMap((run) => Object.keys(run.memoryParts?.[kind] ?? {}))));
  const parts = data.memoryOrder.filter((part) => found.has(part));
  const whole = (run) => run.memoryParts ?? { measured: { "allocated at most": run.memory }, planned: {} };
  if (rows.some((run) => !run.memoryParts)) parts.push("allocated at most");
  const lines = rows.flatMap((run) => kinds.map(([kind, opacity, said]) => ({ name: run.name + said, label: shorten(run.name, narrow() ? 18 - said.length : 34) + said, parts: whole(run)[kind], opacity }))).filter((line) => Object.keys(line.parts).length);
  nameKey("memory-key", parts);
  bars("memory", lines.map((line) => line.name), parts.map((part, i) => ({
    type: "bar", orientation: "h", name: part, y: lines.map((line) => line.name), x: lines.map((line) => line.parts[part] ?? 0),
    marker: { color: PARTS[i % PARTS.length], opacity: lines.map((line) => line.opacity) },
    hovertemplate: `<b>%{y}</b><br>${part} %{x:.4~g} GiB<extra></extra>`,
  })), "GiB", lines.map((line) => line.label));
}
function drawCosts() {
  if (find("time")) {
    const rows = data.runs.filter((run) => run.time).map((run) => ({ ...run, whole: Object.values(run.time.parts).reduce((a, b) => a + b, 0) })), parts = [...new Set(rows.flatMap((run) => Object.keys(run.time.parts)))];
    const several = parts.length > 2;
    const said = (run) => (run.emulated ? ", emulated" : "");
    nameKey("time-key", several ? parts : []);
    bars("time", rows.map((r) => r.name), parts.map((part, i) => {
      const values = rows.map((r) => r.time.parts[part] ?? 0), colours = rows.map((r) => (several ? PARTS[i % PARTS.length] : i ? ink("--soft") : r.colour));
      return {
        type: "bar", orientation: "h", name: part, y: rows.map((r) => r.name), x: values, customdata: rows.map(said),
        marker: { color: rows.map((r, n) => (r.emulated ? ink("--card") : colours[n])), line: { color: colours, width: values.map((v, n) => (v > 0.01 * rows[n].whole ? 1.6 : 0)) }, opacity: 0.9 },
        hovertemplate: `<b>%{y}</b><br>${part} %{x:.4~g} ms%{customdata}<extra></extra>`,
      };
    }), "ms", rows.map((r) => (narrow() ? shorten(r.name, 18) + said(r).replace(", ", "<br>") : shorten(r.name, 34 - said(r).length) + said(r))));
  }
  if (find("memory")) {
    const rows = data.runs.filter((run) => run.memory);
    if (rows.some((run) => run.memoryParts)) return drawMemoryParts(rows);
    const bar = (values, opacity, what) => ({
      type: "bar", orientation: "h", y: rows.map((r) => r.name), x: values, marker: { color: rows.map((r) => r.colour), opacity },
      hovertemplate: `<b>%{y}</b><br>${what} %{x:.4~g} GiB<extra></extra>`,
    });
    const held = { ...bar(rows.map((r) => r.memory), 0.9, ""), text: rows.map((r) => r.memory.toPrecision(3)), textposition: "inside", insidetextanchor: "end", textfont: { color: rows.map((r) => inkOn(r.colour)), size: 11 } };
    const beyond = rows.map((r) => Math.max(0, (r.reserved ?? r.memory) - r.memory));
    bars("memory", rows.map((r) => r.name), beyond.some(Boolean) ? [held, bar(beyond, 0.35, "reserved beyond it:")] : [held], "GiB");
  }
}

// ── Table and switches ───────────────────────────────────────────────────────────────────────────────────────────────────────

function makeSortable() {
  all("#table th button").forEach((button, column) => button.addEventListener("click", () => {
    const now = state.sort;
    sortBy({ column, down: now?.column === column ? !now.down : column > 3 });
  }));
  if (state.sort) sortBy(state.sort);
}
function sortBy(sort) {
  state.sort = sort;
  keep();
  const body = document.querySelector("#table tbody"), key = (row) => row.cells[sort.column].dataset.value;
  const rows = [...body.rows].sort((a, b) => {
    const [x, y] = [key(a), key(b)];
    if (x === "" || y === "") return (x === "") - (y === "");  // what is not known stands last, either way
    const order = isNaN(x) || isNaN(y) ? x.localeCompare(y, "en", { numeric: true }) : Number(x) - Number(y);
    return sort.down ? -order : order;
  });
  body.append(...rows);
  all("#table th").forEach((th, i) => (i === sort.column ? th.setAttribute("aria-sort", sort.down ? "descending" : "ascending") : th.removeAttribute("aria-sort")));
}

function listen() {
  const on = (selector, act) => all(selector).forEach((b) => b.addEventListener("click", () => { act(b); keep(); }));
  on("[data-axis]", (b) => { state.axis = b.dataset.axis; state.zoom = null; drawCurves(); });
  on("[data-smooth]", (b) => { state.smooth = Boolean(b.dataset.smooth); drawCurves(); });
  on("[data-measure]", (b) => { state.measure = b.dataset.measure; drawHeat(); });
  on("[data-theme-of]", (b) => chooseTheme(b.dataset.themeOf));
  find("heat-run")?.addEventListener("change", (event) => { state.heatRun = Number(event.target.value); keep(); drawHeat(); });
  all("[data-toggle]").forEach((button) => {
    const index = Number(button.dataset.toggle);
    button.addEventListener("click", (event) => {
      if (event.detail > 1) return;
      state.hidden = shown(index) ? [...state.hidden, index] : state.hidden.filter((i) => i !== index);
      keep();
      drawCurves();
    });
    button.addEventListener("dblclick", () => {
      const others = data.runs.map((_, i) => i).filter((i) => i !== index);
      state.hidden = others.every((i) => !shown(i)) ? [] : others;
      keep();
      drawCurves();
    });
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { try { if (localStorage.getItem("report-theme")) return; } catch {} chooseTheme(""); });
  let was = narrow();
  window.addEventListener("resize", () => { if (was !== narrow()) { was = narrow(); drawAll(); } });
}

let followed = false;
function drawAll() {
  drawSpeed();
  drawEnds();
  drawCurves();
  drawHeat();
  drawCosts();
  if (!followed) all("[data-curve]").forEach(follow);
  followed = true;
}

start();
