"use strict";
podrl.views.samples = async (main, params, current) => {
  const { el, fill, get, go, link, long, number, pick, runPick, runs } = podrl;
  const run = Number(params.get("run") || 0), wanted = Object.fromEntries(params);
  delete wanted.token;
  const change = (more) => go("samples", { ...wanted, offset: "", ...more }, true);
  const box = (name, label, type, size) => el("label", {}, label, " ", el("input", { name, type, size, value: wanted[name] || "", onchange: (event) => change({ [name]: event.target.value }) }));
  const STOPS = ["", "end", "length", "stop string", "failed", "environment", "deadline", "calls"];
  const SORTS = [["", "newest first"], ["reward", "lowest reward"], ["-reward", "highest reward"], ["-mismatch", "largest mismatch"], ["-length", "longest"], ["length", "shortest"]];
  const bar = el("form", { className: "bar", onsubmit: (event) => event.preventDefault() }, runPick("samples", params), box("q", "text", "search", 20),
    runs[run].traced.length ? pick("step", ["", ...runs[run].traced], wanted.step || "", (step) => change({ step }), ["all", ...runs[run].traced]) : null,
    box("low", "reward from", "number", 4), box("high", "to", "number", 4),
    runs[run].traced.length ? pick("ended by", STOPS, wanted.stop || "", (stop) => change({ stop }), ["anything", ...STOPS.slice(1)]) : null,
    runs[run].traced.length ? el("label", {}, el("input", { type: "checkbox", checked: !!wanted.failed, onchange: (event) => change({ failed: event.target.checked ? 1 : "" }) }), " a tool failed") : null,
    pick("sort", SORTS.map(([key]) => key), wanted.sort || "", (sort) => change({ sort }), SORTS.map(([, text]) => text)));
  const found = await get("samples", { ...wanted, run });
  if (!current()) return null;
  const HEADS = [runs[run].traced.length ? "step / group / sample" : "step", "reward", "tokens", "ended by", "mismatch (nats)", "rewards by function", "prompt", "reference", "completion"];
  const MISMATCH = "mean distance of the trainer's and the sampler's log-probabilities of a token";
  const cell = (i, className, ...texts) => el("td", { className, "data-head": HEADS[i] }, texts);  // a narrow window shows its column's head in each cell
  const by = (rewards) => Object.entries(rewards || {}).map(([name, reward]) => el("div", { className: reward ? "" : "quiet" }, `${name} ${number(reward, 3)}`));
  const folded = (prompt) => prompt.length <= 90 ? prompt : el("details", {}, el("summary", {}, `…${prompt.trimEnd().slice(-80)}`), prompt);
  const WHY = { history: "it repeats no earlier answer", tools: "it has other tools", template: "the chat template renders an earlier answer differently", concurrent: "another request went on from the same point" };
  const turn = (one) => el("div", { className: one.failed ? "turn problem" : "turn" }, el("b", {}, String(one.by)), el("span", { className: "quiet" }, ` ${number(one.tokens)} tokens${one.reward ? ` · reward ${number(one.reward, 3)}` : ""} `), ...long(String(one.text), 1200));
  const branch = (one) => el("details", { className: "branch", open: true }, el("summary", {}, `piece ${one.piece}`, el("span", { className: "quiet" }, one.why ? ` · ${one.why}: ${WHY[one.why] || ""}` : "", one.shared ? ` · begins with ${number(one.shared)} tokens of piece ${one.of}` : "")), one.turns.map(turn), one.branches.map(branch));
  const rows = found.rows.map((row) => row.problem ? el("tr", {}, el("td", { colSpan: 9, className: "problem" }, row.problem)) : el("tr", {},
    el("td", {}, row.group === undefined ? String(row.step) : link("groups", { run, step: row.step, group: row.group, sample: row.sample }, {}, `${row.step} / ${row.group} / ${row.sample}`)),
    cell(1, "number", number(row.reward, 3)), cell(2, "number", number(row.length)), cell(3, "", row.stop || "", row.failed ? " (tool failed)" : ""),
    cell(4, "number", number(row.mismatch, 2)), cell(5, "by", ...by(row.rewards)), cell(6, "text", folded(row.prompt)), cell(7, "text", row.truth || ""), row.branches.length ? el("td", { className: "text", "data-head": HEADS[8] }, row.branches.map(branch)) : cell(8, "text", row.given ? el("div", { className: "quiet" }, "a text of the training data:") : null, ...long(row.completion, 1200))));
  // A column without a value on this page is left out: runs on given answers have no rewards, runs without a trace no endings.
  const filled = HEADS.map((_, i) => rows.some((row) => i < row.cells.length && !["", "–"].includes(row.cells[i].textContent)));
  for (const row of rows) if (row.cells.length > 1) [...row.cells].forEach((each, i) => { if (!filled[i]) each.remove(); });
  const turned = (offset) => { go("samples", { ...wanted, offset: offset || "" }, true); scrollTo(0, 0); };
  const page = (offset, text) => el("button", { type: "button", disabled: offset < 0 || offset >= found.count, onclick: () => turned(offset) }, text);
  const pages = () => found.count <= 100 ? null : [" ", page(found.offset - 100, "previous 100"), " ", page(found.offset + 100, "next 100")];
  if (!found.count) {
    const asked = ["q", "step", "low", "high", "stop", "failed"].some((name) => wanted[name]);
    fill(main, bar, el("p", { className: "quiet" }, asked ? "No sample is as asked for: leave out a word or a bound." : "This run has no samples yet: the first are written after its first step, or log.samples_every=0 records none."));
    return null;
  }
  const shown = found.count > 100 ? `, of which these are ${found.offset + 1} to ${found.offset + found.rows.length}` : "";
  fill(main, bar, el("p", { className: "quiet" }, `${found.count} sample${found.count === 1 ? "" : "s"}${found.left_out ? " of the newest 50 traced steps" : ""}${shown}`, pages()),
    el("table", { className: "wide found" }, el("thead", {}, el("tr", {}, HEADS.filter((_, i) => filled[i]).map((text) => el("th", { title: text.startsWith("mismatch") ? MISMATCH : "" }, text)))), el("tbody", {}, rows)),
    el("p", {}, pages()));
  return null;
};
