"use strict";
podrl.views.timeline = async (main, params, current) => {
  const { el, fill, get, go, number, runPick, watch } = podrl;
  const run = params.get("run") || 0, asked = params.get("first") || params.get("seconds");
  const found = await get("timeline", { run, first: params.get("first"), last: params.get("last"), seconds: params.get("seconds") });
  if (!current()) return null;
  const bar = el("div", { className: "bar" }, runPick("timeline", params));
  if (!found.spans.length) {
    fill(main, bar, el("p", { className: "quiet" }, found.steps[1] ? "No spans of these steps." : "This run has no spans.jsonl: log.trace was 'off', or it has not made a step."));
    return null;
  }
  const width = found.last - found.first + 1;
  const move = (by, size = width) => {
    const last = Math.min(Math.max(found.last + by, found.steps[0] + size - 1), found.steps[1]);
    go("timeline", { run, first: Math.max(last - size + 1, found.steps[0]), last });
  };
  const button = (text, title, act) => el("button", { type: "button", title, onclick: act }, text);
  bar.append(button("◀", "earlier steps", () => move(-width)), button("▶", "later steps", () => move(width)),
    el("span", {}, width > 1 ? `steps ${found.first} to ${found.last} of ${found.steps[1]}` : `step ${found.first} of ${found.steps[1]}`),
    ...[1, 2, 10, 100].map((size) => button(`${size} step${size > 1 ? "s" : ""}`, `show ${size} at a time`, () => move(0, size))),
    button("1 hour", "show the hour up to the end of the last step", () => go("timeline", { run, last: found.last, seconds: 3600 })),
    el("span", { className: "quiet" }, "drag to zoom, double-click to see all"),
    found.left_out ? el("span", { className: "quiet" }, `${found.left_out} short spans are not drawn`) : "");

  const begin = found.spans[0].start, end = Math.max(...found.spans.map((span) => span.start + span.s));
  const rows = [...new Set(found.spans.map((span) => `${span.host} · ${span.lane}`))].sort((a, b) => rank(a) - rank(b) || (a < b ? -1 : 1));
  // Calls of tools overlap: their lane has rows, as many as there were calls at once, up to 16.
  const deep = new Map(rows.map((row) => [row, 1]));
  for (const span of found.spans) if (span.lane === "tools") deep.set(lane(span), Math.max(deep.get(lane(span)), Math.min(span.row + 1, 16)));
  const halves = rows.reduce((all, row) => all + Math.max(deep.get(row), 2), 0), tops = new Map(), TOP = 22;
  let LOW, HIGH, FONT, bottom;
  // Lanes share the height that the window has left beside what stands above them and the tables below, or their first lines.
  function arrange() {
    const hold = canvas.parentElement, above = hold.getBoundingClientRect().top + scrollY;
    const below = main.getBoundingClientRect().bottom - hold.getBoundingClientRect().bottom;
    LOW = Math.max(Math.floor((innerHeight - above - Math.min(below, innerHeight / 4) - TOP - 10) / halves), 9);
    HIGH = 2 * LOW;
    FONT = `${HIGH > 50 ? 14 : 12}px system-ui, sans-serif`;
    bottom = rows.reduce((top, row) => { tops.set(row, top); return top + tall(row); }, TOP);
  }
  const tall = (row) => row.endsWith(" tools") ? Math.max(deep.get(row) * LOW + 4, HIGH) : HIGH;
  let from = begin, to = end, boxes = [];
  const canvas = el("canvas", { className: "lanes", tabIndex: 0, ariaLabel: "timeline; the table below has the same in words" });
  const measure = canvas.getContext("2d");
  measure.font = "12px system-ui, sans-serif";
  const LEFT = Math.min(150, 16 + Math.max(...rows.map((row) => measure.measureText(row).width)));
  const tip = el("div", { className: "tip", hidden: true });
  const style = getComputedStyle(document.documentElement), ink = style.getPropertyValue("--ink").trim(), grid = style.getPropertyValue("--grid").trim();
  const critical = new Map(Object.values(found.paths).flat().map((part) => [`${part.host}|${part.lane}|${part.name}|${part.start}`, part]));

  function lane(span) { return `${span.host} · ${span.lane}`; }
  function rank(row) {
    const role = row.startsWith("trainer") ? 0 : 1, lane = ["loop", "trainer", "rollout", "tools", "compile"].findIndex((name) => row.endsWith(` ${name}`));
    return role * 1000 + Number((row.match(/\d+/) || [0])[0]) * 10 + (lane < 0 ? 5 : lane);
  }

  function draw() {
    arrange();
    const wide = canvas.parentElement.clientWidth, high = bottom + 6, ratio = devicePixelRatio || 1;
    canvas.width = wide * ratio; canvas.height = high * ratio;
    canvas.style.height = `${high}px`;
    const pen = canvas.getContext("2d"), x = (t) => LEFT + (t - from) / (to - from) * (wide - LEFT - 8);
    pen.scale(ratio, ratio);
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    for (const row of rows) { pen.fillStyle = ink; pen.fillText(row, 4, tops.get(row) + HIGH / 2, LEFT - 10); }
    const unit = nice((to - from) / Math.max(Math.min((wide - LEFT) / 75, 8), 1));
    for (let t = Math.ceil((from - begin) / unit) * unit; t <= to - begin; t += unit) {
      const at = x(begin + t);
      pen.fillStyle = grid; pen.fillRect(at, TOP, 1, high);
      pen.fillStyle = ink; pen.textAlign = at + 50 < wide ? "left" : "right"; pen.fillText(`${number(t, 3)} s`, at + (at + 50 < wide ? 2 : -2), 10);
    }
    pen.textAlign = "left";
    pen.save();
    pen.beginPath(); pen.rect(LEFT, 0, wide, high); pen.clip();
    pen.font = FONT;
    boxes = [];
    for (const span of found.spans) {
      const a = x(span.start), b = x(span.start + span.s);
      if (b < LEFT || a > wide) continue;
      const call = span.lane === "tools", thick = call ? LOW - 1 : HIGH - 6, long = Math.max(b - a, 1.5);
      const top = tops.get(lane(span)) + 3 + (call ? span.row % 16 * LOW : 0);
      pen.fillStyle = hue(span.name, span);
      pen.globalAlpha = waits(span) ? 0.25 : 0.85;
      pen.fillRect(a, top, long, thick);
      pen.globalAlpha = 1;
      const lines = thick > 50 ? [span.name, `${number(span.s, 3)} s`] : [span.name];
      if (long > 34 && pen.measureText(span.name).width < 1.2 * (long - 6)) {
        pen.fillStyle = waits(span) ? ink : "#111";
        lines.forEach((text, i) => pen.fillText(text, Math.max(a, LEFT) + 3, top + thick / 2 + 18 * (i - (lines.length - 1) / 2), long - 6));
      }
      boxes.push([a, top, a + long, top + thick, span]);
    }
    pen.fillStyle = style.getPropertyValue("--critical").trim();
    for (const part of critical.values()) {
      const top = tops.get(lane(part));
      pen.fillRect(x(part.start), top + HIGH - 3, Math.max(x(part.start + part.s) - x(part.start), 1), 3);
    }
    pen.restore();
  }

  const waits = (span) => span.name.startsWith("waiting") || (span.lane === "loop" && span.name === "rollout");
  const NAMES = ["update", "rollout", "reward", "score", "publish", "checkpoint", "evaluation", "compile", "data", "metrics", "start-up", "restoring"];
  function hue(name, span) {
    if (span.lane === "tools") return span.failed ? "hsl(4 75% 60%)" : "hsl(190 35% 62%)";
    const known = NAMES.indexOf(name);
    return `hsl(${known < 0 ? 0 : known * 137 % 360} ${known < 0 ? 0 : 60}% 62%)`;
  }
  const shown = [...new Set(found.spans.filter((span) => span.lane !== "tools" && !waits(span)).map((span) => span.name))].sort((a, b) => order(a) - order(b) || (a < b ? -1 : 1));
  function order(name) { const known = NAMES.indexOf(name); return known < 0 ? NAMES.length : known; }
  const sample = (paint, text) => { const box = el("i"); Object.assign(box.style, paint); return el("span", { className: "named" }, box, text); };
  const legend = el("div", { className: "bar legend" }, shown.map((name) => sample({ background: hue(name, {}) }, name)),
    found.spans.some(waits) ? sample({ background: "hsl(0 0% 62%)", opacity: 0.25 }, "pale: waiting for others") : null,
    found.spans.some((span) => span.lane === "tools") ? [sample({ background: hue("", { lane: "tools" }) }, "call of a tool"), sample({ background: hue("", { lane: "tools", failed: true }) }, "call that failed")] : null,
    sample({ background: "var(--critical)", height: "3px" }, "what the rest waited for"));
  const nice = (raw) => { const power = 10 ** Math.floor(Math.log10(raw || 1)); return [1, 2, 5, 10].map((n) => n * power).find((n) => n >= raw); };

  let pressed = null;
  const time = (event) => { const box = canvas.getBoundingClientRect(); return from + (event.clientX - box.left - LEFT) / (box.width - LEFT - 8) * (to - from); };
  canvas.addEventListener("pointerdown", (event) => { pressed = time(event); });
  canvas.addEventListener("pointerup", (event) => {
    const now = time(event);
    if (pressed !== null && Math.abs(now - pressed) > (to - from) / 100) { [from, to] = [Math.min(now, pressed), Math.max(now, pressed)]; draw(); }
    pressed = null;
  });
  canvas.addEventListener("dblclick", () => { from = begin; to = end; draw(); });
  canvas.addEventListener("keydown", (event) => {
    const wide = to - from, middle = (from + to) / 2;
    if (event.key === "ArrowLeft") { from -= wide / 5; to -= wide / 5; } else if (event.key === "ArrowRight") { from += wide / 5; to += wide / 5; }
    else if (event.key === "+") { from = middle - wide / 4; to = middle + wide / 4; } else if (event.key === "-") { from = middle - wide; to = middle + wide; } else return;
    event.preventDefault(); draw();
  });
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect(), px = event.clientX - box.left, py = event.clientY - box.top;
    const hit = boxes.filter(([a, top, b, low]) => px >= a && px <= b && py >= top && py <= low).pop();
    tip.hidden = !hit;
    if (hit) {
      const span = hit[4];
      tip.textContent = `${span.name}${span.failed ? ` failed: ${span.failed}` : ""} · ${number(span.s)} s · step ${span.step} · ${span.host} · from ${number(span.start - begin)} s`;
      tip.style.left = `${Math.min(px + 12, box.width - 320)}px`; tip.style.top = `${py + 16}px`;
    }
  });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });

  const told = Object.entries(found.paths).slice(-5).map(([step, path]) => {
    const all = path.reduce((sum, part) => sum + part.s, 0), by = new Map();
    for (const part of path) by.set(`${part.name} (${part.host})`, (by.get(`${part.name} (${part.host})`) || 0) + part.s);
    const rows = [...by].filter(([, s]) => s >= 0.01 * all).sort((a, b) => b[1] - a[1]).slice(0, 6);
    return el("tr", {}, el("td", {}, step), el("td", { className: "nowrap" }, `${number(all, 3)} s`),
      el("td", {}, rows.map(([name, s]) => `${name} ${number(s, 3)} s, ${Math.round(100 * s / all)} %`).join(" · ")));
  });
  const calls = new Map();
  for (const span of found.spans.filter((each) => each.lane === "tools")) {
    const of = calls.get(span.name) || { count: 0, failed: 0, all: 0, most: 0 };
    calls.set(span.name, { count: of.count + 1, failed: of.failed + (span.failed ? 1 : 0), all: of.all + span.s, most: Math.max(of.most, span.s) });
  }
  const called = calls.size ? el("table", {}, el("caption", {}, "Calls of tools drawn above, red where they failed"),
    el("thead", {}, el("tr", {}, ["tool", "calls", "failed", "mean", "longest"].map((text) => el("th", {}, text)))),
    el("tbody", {}, [...calls].map(([name, of]) => el("tr", {}, [name, of.count, of.failed, `${number(of.all / of.count, 3)} s`, `${number(of.most, 3)} s`].map((text) => el("td", {}, String(text))))))) : null;
  fill(main, bar, legend, el("div", { className: "hold" }, canvas, tip),
    el("table", { className: "paths" }, el("caption", {}, "The critical path of a step: what the rest waited for (underlined above)"),
      el("thead", {}, el("tr", {}, ["step", "took", "of it"].map((text) => el("th", {}, text)))), el("tbody", {}, told)), called);
  draw();
  window.addEventListener("resize", draw);
  const unwatch = asked ? () => {} : watch(() => go("timeline", { run }, true));
  return () => { window.removeEventListener("resize", draw); unwatch(); };
};
