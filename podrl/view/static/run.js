"use strict";
podrl.views.run = async (main, params, current) => {
  const { el, fill, get, go, number, interval, isShare, time, pick, runPick, runs } = podrl;
  const run = Number(params.get("run") || 0), other = params.get("with") || "", here = runs[run];
  const [mine, theirs] = await Promise.all([get("config", { run }), other === "" ? null : get("config", { run: other })]);
  if (!current()) return null;
  const flat = (value, prefix = "") => value !== null && typeof value === "object" && !Array.isArray(value)
    ? Object.entries(value).flatMap(([key, each]) => flat(each, prefix ? `${prefix}.${key}` : key)) : [[prefix, value === null ? "none" : JSON.stringify(value)]];
  const a = new Map(flat(mine.config)), b = theirs ? new Map(flat(theirs.config)) : null;
  const names = [...new Set([...a.keys(), ...(b ? b.keys() : [])])].sort().filter((name) => !b || a.get(name) !== b.get(name));
  // Settings that differ from the defaults are marked, and come first unless two runs are compared.
  const usual = new Map(flat(mine.defaults || {})), unusual = (name) => usual.size > 0 && a.get(name) !== usual.get(name);
  if (!b) names.sort((one, two) => unusual(two) - unusual(one));
  let filter = "";
  const body = el("tbody");
  const draw = () => body.replaceChildren(...names.filter((name) => name.includes(filter)).map((name) =>
    el("tr", { className: unusual(name) ? "unusual" : "" }, el("td", {}, unusual(name) ? el("b", {}, name) : name), el("td", { className: "value" }, a.get(name) ?? "absent"),
      b ? el("td", { className: "value" }, b.get(name) ?? "absent") : null, usual.size ? el("td", { className: "value quiet" }, unusual(name) ? usual.get(name) ?? "no default" : "") : null)));
  draw();
  const own = names.filter(unusual).length;
  const others = runs.map((_, i) => i).filter((i) => i !== run);
  const table = (caption, rows, heads) => el("table", {}, el("caption", {}, caption), heads ? el("thead", {}, el("tr", {}, heads.map((text) => el("th", {}, text)))) : null,
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell, i) => el("td", { className: i ? "value" : "" }, cell))))));
  const parts = [];
  const { before = {}, after = {}, seconds = {} } = mine.summary || {}, told = { tables: [], lines: [], ...mine.about };
  const measured = Object.keys(after).filter((name) => !name.startsWith("error/") && name !== "records" && before[name] !== null && before[name] !== undefined);
  const cell = (values, name) => {
    const ends = interval(name, values[name], values[`error/${name}`], values[name.includes("/") && !/^(greedy|sampled)_/.test(name) ? `${name.split("/")[0]}/records` : "records"]);
    const written = isShare(name) ? (value) => (100 * value).toFixed(1) : (value) => number(value);
    return `${written(values[name])}${isShare(name) ? "\u00a0%" : ""}${ends ? ` [${ends.map(written).join(",\u00a0")}]` : ""}`;
  };
  if (measured.length) parts.push(table(`Held-out records${after.records ? `: ${after.records}` : ""}, 95 % intervals`, measured.map((name) => [name, cell(before, name), cell(after, name)]), ["mean", "before", "after"]));
  if ((mine.plan || []).length) parts.push(table(`Plan${mine.planned_for ? ` for ${mine.planned_for}` : ""} beside what was measured${(mine.summary || {}).devices ? ` on ${mine.summary.devices}` : ""}`,
    mine.plan.map((row) => [row.name, `${number(row.planned, 3)} ${row.unit}`, row.how, row.measured === null ? "not known here" : `${number(row.measured, 3)} ${row.unit}`, row.ratio === null ? "" : `${number(row.ratio, 3)} ×`]), ["", "plan", "", "measured", "measured / plan"]),
    el("p", { className: "quiet" }, "Predicted: every program at its roofline; counted: by the compiler; assumed: what the plan was made for. Measured: medians of the last 20 steps, and the most memory."));
  const top = parts.splice(0);
  const last = here.last, timed = Object.keys(last).filter((name) => name.startsWith("time/") || name.startsWith("perf/") || name.endsWith("per_s"));
  if (!timed.length) parts.push(el("p", { className: "quiet" }, "No step has been measured yet: the first one is written when the second has begun."));
  else parts.push(table("Measured: the newest step, and the sum where the run has ended", timed.sort().map((name) => [name, number(last[name]), name.startsWith("time/") ? time(seconds[name.slice(5)]) : ""]), ["", "last", "in all"]));
  const chosen = [
    el("label", { className: "bar" }, b ? "settings that differ " : "settings ", el("input", { type: "search", placeholder: "e.g. learning_rate", oninput: (event) => { filter = event.target.value; draw(); } })),
    names.length ? null : el("p", { className: "quiet" }, b ? "The two configurations are the same." : "config.json cannot be read."),
    usual.size && names.length ? el("p", { className: "quiet" }, `${own} of these settings differ from the defaults; they are marked${b ? "" : " and come first"}.`) : null,
    el("table", { className: "settings" }, el("thead", {}, el("tr", {}, el("th", {}, "key"), el("th", {}, here.name), b ? el("th", {}, runs[Number(other)].name) : null, usual.size ? el("th", {}, "default") : null)), body)];
  fill(main,
    el("div", { className: "bar" }, runPick("run", params), others.length ? pick("difference to", ["", ...others], other, (to) => go("run", { run, with: to }), ["none", ...others.map((i) => runs[i].name)]) : null,
      el("span", { className: "quiet" }, here.place)),
    b ? chosen : null,
    el("div", { className: "columns" }, top.length ? el("div", {}, top) : null,
      told.tables.length ? el("section", { className: "counted" }, el("h2", {}, "Counted from the settings when the run began"), 
        told.tables.map(({ title, header, rows }) => table(title, rows, header)), told.lines.map((line) => el("p", { className: "said" }, line))) : null),
    el("div", { className: "columns" }, parts),
    b ? null : chosen);
  return null;
};
podrl.begin();
