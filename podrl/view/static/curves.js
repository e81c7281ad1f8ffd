"use strict";
podrl.views.curves = async (main, params, current) => {
  const { el, fill, get, go, number, interval, color, save, runs, watch } = podrl;
  // [title, pattern, open at first]: a metric is in the first panel whose pattern matches its name. The metrics of FIRST
  // come first in their panels.
  const PANELS = [["Rewards, by function", /^reward\/(?!zero\/|std$|kl)/, true], ["Accuracy", /^accuracy\//, true],
    ["Loss on given answers", /^(sft|dpo|orpo|kto|reward_model)\//, true],
    ["Policy", /^(actor\/(kl|entropy|grad_norm|lr)|reward\/kl|sampler\/abs_diff|critic\/explained_variance|opd\/reverse_kl)$/, true],
    ["Answers", /^completion\//, true], ["Speed", /^(time|perf|rollout|tokens)\//, false], ["Evaluations", /^eval\//, false],
    ["Environments and tools", /^(episode|env|tools)\//, false], ["Rewards: spread, zeros, groups of prompts", /^(reward|group)\//, false],
    ["Update", /^(actor|critic|loss|opd|echo|sampler)\//, false], ["Everything else", /./, false]];
  const FIRST = ["reward/mean", "accuracy/answer", "sft/loss", "dpo/loss", "dpo/accuracy", "actor/kl", "reward/kl", "actor/entropy", "actor/grad_norm",
    "completion/length_mean", "completion/truncated", "rollout/tokens_per_s", "time/step", "perf/mfu", "perf/goodput"];
  const WHOLE = Array.from({ length: 28 }, (_, i) => [1, 2, 5][i % 3] * 10 ** Math.floor(i / 3)); // ticks are whole steps
  podrl.unfolded = podrl.unfolded || new Set(PANELS.filter(([, , open]) => open).map(([title]) => title));
  const rank = (name) => FIRST.includes(name) ? FIRST.indexOf(name) : name === "reward/groups_without_signal" ? 98 : 50;
  const units = Object.assign({}, ...runs.map((run) => run.units));
  const known = [...new Set(runs.flatMap((run) => run.metrics))].sort().filter((name) => !name.startsWith("eval/error/"));
  const trained = new Set(known.filter((name) => !name.startsWith("eval/")));
  let filter = params.get("find") || "", smooth = Number(params.get("smooth") || 0.6), charts = [], fetched = new Map();

  const list = el("div", { className: "panels" });
  const find = el("input", { type: "search", placeholder: "e.g. reward or tools/", value: filter, oninput: () => { filter = find.value; keep(); draw(); } });
  const slider = el("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: smooth, oninput: () => { smooth = Number(slider.value); keep(); for (const each of charts) each.set(); } });
  const csv = el("button", { type: "button", onclick: download }, "CSV");
  fill(main, el("div", { className: "bar" }, el("label", {}, "metric ", find), el("label", {}, "smoothing ", slider), csv,
    el("span", { className: "quiet" }, "drag, or + and - in a chart, to zoom, double-click or 0 to see all; dots and rings: held-out records, sampled and greedy, with 95 % intervals" + (runs.length > 1 ? ", runs side by side" : ""))), list);

  const keep = () => history.replaceState(null, "", podrl.address("curves", { find: filter, smooth: smooth === 0.6 ? "" : smooth }));
  // [title, names] of each panel with metrics; with a filter, one panel without a title.
  const panels = () => {
    const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
    if (words.length) return [["", known.filter((name) => words.every((word) => name.toLowerCase().includes(word))).slice(0, 60)]];
    const made = new Map(PANELS.map(([title]) => [title, []]));
    const shown = new Set([...trained].flatMap(evaluations)); // they are drawn beside the metrics that they evaluate
    for (const name of known.filter((each) => !shown.has(each))) made.get(PANELS.find(([, form]) => form.test(name))[0]).push(name);
    return [...made].filter(([, names]) => names.length).map(([title, names]) => [title, names.sort((one, two) => rank(one) - rank(two)).slice(0, 60)]);
  };
  const chosen = () => panels().filter(([title]) => !title || podrl.unfolded.has(title)).flatMap(([, names]) => names);
  const evaluations = (name) => {
    const part = name === "reward/mean" ? "reward" : name.startsWith("accuracy/") ? name.slice(9) : name.startsWith("reward/") ? name : null;
    const found = part ? [`eval/sampled_${part}`, `eval/greedy_${part}`] : name.startsWith("eval/") ? [name] : [];
    return found.filter((each) => known.includes(each));
  };
  const error = (name) => name.replace("eval/", "eval/error/");

  async function load(names) {
    const wanted = [...new Set(names.flatMap((name) => [name, ...evaluations(name).flatMap((n) => [n, error(n)])]))];
    await Promise.all(runs.map(async (run, index) => {
      const some = wanted.filter((name) => run.metrics.includes(name));
      for (let i = 0; i < some.length; i += 50) {
        const found = await get("metrics", { run: index, name: some.slice(i, i + 50) });
        for (const [name, columns] of Object.entries(found)) fetched.set(`${index} ${name}`, columns);
      }
    }));
  }

  function smoothed(values) {
    let mean = 0, weight = 0;
    return values.map((value) => {
      if (value === null) return null;
      mean = smooth * mean + (1 - smooth) * value;
      weight = smooth * weight + (1 - smooth);
      return mean / weight;
    });
  }

  function chart(name) {
    const box = el("figure", { className: "chart" }), plain = name.startsWith("eval/");
    const style = getComputedStyle(document.documentElement);
    const ink = style.getPropertyValue("--ink").trim(), grid = style.getPropertyValue("--grid").trim();
    let tables, series, dots;
    function gather() {
      tables = []; series = [{ label: "step" }]; dots = [];
      runs.forEach((run, index) => {
        const [steps, values] = fetched.get(`${index} ${name}`) || [[], []], hue = color(index);
        const tag = runs.length > 1 ? ` ${run.name}` : "";
        const dash = index ? [12, 5 * index] : undefined; // dashes let an equal curve behind this one stay visible
        if (!plain && steps.length) {
          tables.push([steps, values], [steps, smoothed(values)]);
          series.push({ label: tag ? run.name : name, stroke: hue, width: 1, alpha: 0.45, points: { show: false }, spanGaps: true },
            { label: "smoothed", stroke: hue, width: 2, dash, points: { show: steps.length < 3, size: 7, fill: hue }, spanGaps: true });
        }
        evaluations(name).forEach((evaluation, which) => {
          const [at, seen] = fetched.get(`${index} ${evaluation}`) || [[], []];
          const [, errors] = fetched.get(`${index} ${error(evaluation)}`) || [[], []];
          if (!at.length) return;
          tables.push([at, seen]);
          series.push({ label: `${evaluation}${tag}`, stroke: hue, width: plain ? 2 : 0, dash, spanGaps: true, paths: plain ? undefined : () => null, points: { show: false } });
          const hollow = evaluation.includes("greedy"), aside = Math.min(9, 40 / runs.length) * (index - (runs.length - 1) / 2);
          at.forEach((step, i) => { if (seen[i] !== null) dots.push({ step, mean: seen[i], ends: interval(evaluation, seen[i], errors[i]), hue, hollow, aside }); });
        });
      });
      return tables.length ? uPlot.join(tables) : [[], []];
    }
    // Dots of several runs stand side by side, so that equal ones are all visible; a ring goes around a dot of the same value.
    const evaluated = (plot) => {
      const { ctx } = plot, ratio = devicePixelRatio;
      ctx.save();
      ctx.lineWidth = 1.5 * ratio;
      ctx.setLineDash([]);
      for (const { step, mean, ends, hue, hollow, aside } of dots) {
        const middle = plot.valToPos(step, "x", true), x = middle + aside * ratio, y = plot.valToPos(mean, "y", true);
        if (middle < plot.bbox.left - 1 || middle > plot.bbox.left + plot.bbox.width + 1) continue;
        ctx.strokeStyle = ctx.fillStyle = hue;
        ctx.beginPath();
        if (ends) { ctx.moveTo(x, plot.valToPos(ends[0], "y", true)); ctx.lineTo(x, plot.valToPos(ends[1], "y", true)); ctx.stroke(); }
        ctx.beginPath(); ctx.arc(x, y, (hollow ? 4.5 : 3) * ratio, 0, 2 * Math.PI);
        if (hollow) ctx.stroke(); else ctx.fill();
      }
      ctx.restore();
    };
    let data = gather();
    const newest = el("span", { className: "quiet" });
    const tell = () => { newest.textContent = ` ${runs.map((run) => run.last[name]).filter((value) => value !== undefined).map((value) => number(value)).join(" / ")}`; };
    tell();
    const unit = units[name] && units[name] !== "1" ? units[name] : "no unit";
    const named = (label) => ({ label, labelSize: 16, labelGap: 0, labelFont: "12px system-ui, sans-serif", font: "11px system-ui, sans-serif" });
    const axis = { stroke: ink, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 } };
    const reach = (plot, low, high) => {
      for (const { ends } of dots) if (ends) { low = Math.min(low, ends[0]); high = Math.max(high, ends[1]); }
      if (low === null || !isFinite(low)) return [0, 1];
      if (low === high && unit === "share of 1") return [-0.06, 1.06];
      const size = Math.max(Math.abs(low), Math.abs(high)); // a constant is drawn flat: its differences are rounding errors
      const room = high - low > 1e-6 * size ? (high - low) * 0.06 : size / 2 || 1;
      return [low - room, high + room];
    };
    const tools = el("span", { className: "tools" },
      el("button", { type: "button", title: `save ${name} as a picture`, onclick: () => picture(plot, name) }, "PNG"));
    box.append(el("figcaption", {}, el("span", {}, el("b", {}, name), newest), tools));
    const hold = el("div", { className: "plot", tabIndex: 0, role: "group", onkeydown: (event) => keyed(event, plot) });
    box.append(hold);
    const options = { width: Math.max(hold.clientWidth, 280), height: 222, series, legend: { show: false }, cursor: { sync: { key: "steps" }, points: { size: 6 } },
      scales: { x: { time: false }, y: { range: reach } }, axes: [{ ...axis, ...named("step"), size: 28, incrs: WHOLE }, { ...axis, ...named(unit), size: 58, values: (_, ticks) => ticks.map((tick) => number(tick)) }], hooks: { draw: [evaluated] } };
    let plot;
    const readout = el("div", { className: "readout", ariaHidden: "true" });
    options.hooks.setCursor = [(at) => {
      const i = at.cursor.idx;
      if (i === null || i === undefined || !at.data[0].length) { readout.replaceChildren(); return; }
      const parts = [`step ${at.data[0][i]}`];
      at.series.forEach((each, s) => { const value = at.data[s][i]; if (s && !(smooth === 0 && each.label.startsWith("smoothed")) && value !== null && value !== undefined) parts.push(`${each.label} ${number(value)}`); });
      readout.textContent = parts.join("   ");
    }];
    options.hooks.setScale = [(at, key) => {
      const range = (scale) => scale.min === null || scale.min === undefined ? "" : ` ${number(scale.min)} to ${number(scale.max)}`;
      hold.ariaLabel = `${name}, steps${range(at.scales.x)}, ${unit}${range(at.scales.y)}: + and - zoom, arrows move, 0 shows all`;
    }];
    return { box, make: () => { options.width = hold.clientWidth; plot = new uPlot(options, data, hold); box.append(readout); },
      set: () => { data = gather(); tell(); if (series.length !== plot.series.length) draw(); else plot.setData(data, plot.scales.x.min === null || wide(plot)); },
      size: () => plot.setSize({ width: hold.clientWidth, height: 222 }), destroy: () => plot && plot.destroy() };
  }

  // Keys zoom as dragging does: they show half or twice as many steps around the middle, a fifth to either side, or all steps.
  function keyed(event, plot) {
    const x = plot.data[0], { min, max } = plot.scales.x, span = max - min;
    if (event.ctrlKey || event.metaKey || event.altKey || x.length < 2 || min === null) return;
    const first = x[0], last = x[x.length - 1];
    const [from, to] = { "+": [min + span / 4, max - span / 4], "=": [min + span / 4, max - span / 4], "-": [min - span / 2, max + span / 2],
      ArrowLeft: [min - span / 5, max - span / 5], ArrowRight: [min + span / 5, max + span / 5], 0: [first, last] }[event.key] || [];
    if (from === undefined) return;
    event.preventDefault();
    const size = Math.min(to - from, last - first), low = Math.min(Math.max(from, first), last - size);
    if (size > 0) plot.setScale("x", { min: low, max: low + size });
  }

  const wide = (plot) => { const x = plot.data[0]; return !x.length || (plot.scales.x.min <= x[0] && plot.scales.x.max >= x[x.length - 1]); };

  function picture(plot, name) {
    const from = plot.ctx.canvas, to = el("canvas", { width: from.width, height: from.height + 40 }), pen = to.getContext("2d");
    pen.fillStyle = getComputedStyle(document.body).backgroundColor;
    pen.fillRect(0, 0, to.width, to.height);
    pen.fillStyle = getComputedStyle(document.body).color;
    pen.font = "24px sans-serif";
    pen.fillText(name, 12, 28);
    pen.drawImage(from, 0, 40);
    save(`${name.replaceAll("/", "_")}.png`, to.toDataURL("image/png"));
  }

  function download() {
    const names = chosen().flatMap((name) => [name, ...evaluations(name)]);
    if (!podrl.offline) {
      save("metrics.csv", `/data/metrics.csv?${new URLSearchParams(names.map((name) => ["name", name]))}`);
      return;
    }
    const rows = [["run", "metric", "step", "value"]];
    runs.forEach((run, index) => names.forEach((name) => {
      const [steps, values] = fetched.get(`${index} ${name}`) || [[], []];
      steps.forEach((step, i) => rows.push([run.name, name, step, values[i]]));
    }));
    save("metrics.csv", URL.createObjectURL(new Blob([rows.map((row) => row.join(",")).join("\n")], { type: "text/csv" })));
  }

  let drawing = 0;
  async function draw() {
    const turn = ++drawing, names = chosen();
    await load(names.filter((name) => runs.some((run, index) => run.metrics.includes(name) && !fetched.has(`${index} ${name}`))));
    if (turn !== drawing || !current()) return;
    for (const each of charts) each.destroy();
    charts = names.map(chart);
    const boxes = new Map(names.map((name, i) => [name, charts[i].box]));
    list.replaceChildren(...panels().map(([title, some]) => {
      const held = el("div", { className: "charts" }, some.map((name) => boxes.get(name)));
      if (!title) return held;
      const open = podrl.unfolded.has(title);
      const panel = el("details", { className: "panel", open }, el("summary", {}, title, el("span", { className: "quiet" }, ` ${some.length}`)), held);
      panel.addEventListener("toggle", () => { if (panel.open !== podrl.unfolded.has(title)) { podrl.unfolded[panel.open ? "add" : "delete"](title); draw(); } });
      return panel;
    }));
    for (const each of charts) each.make();
    if (!known.length || (filter && !names.length)) list.replaceChildren(el("p", { className: "quiet" }, known.length ? "No metric has that in its name." : "No step has been recorded yet."));
  }

  await draw();
  const resized = () => charts.forEach((each) => each.size());
  window.addEventListener("resize", resized);
  const unwatch = watch(async () => {
    if (charts.length === 0) { go("curves", { find: filter }, true); return; }
    await load(chosen());
    if (current()) for (const each of charts) each.set();
  });
  return () => { window.removeEventListener("resize", resized); unwatch(); for (const each of charts) each.destroy(); };
};
