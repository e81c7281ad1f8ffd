"use strict";
// The page's frame: addresses, data from the server or from the file itself, and the line of runs. Text is only ever
// added as text nodes, so that texts of samples are shown and never become part of the page's code.
const podrl = (() => {
  const stored = document.getElementById("data");
  const given = stored ? JSON.parse(stored.textContent) : null;
  const views = {};
  const order = given ? ["curves", "groups", "run"] : ["curves", "timeline", "groups", "samples", "run"];
  let runs = [], leave = () => {}, shown = 0, examined = "";

  function el(tag, attributes, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value === null || value === undefined || value === false) continue;
      if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
      else if (name in made && name !== "list") made[name] = value;
      else made.setAttribute(name, value === true ? "" : String(value));
    }
    for (const child of children.flat()) if (child !== null && child !== undefined) made.append(child);
    return made;
  }

  // A text of which only the first `limit` characters show until its button is pressed.
  function long(text, limit) {
    if (text.length <= limit) return [text];
    return [text.slice(0, limit), el("button", { type: "button", onclick: (event) => event.target.replaceWith(text.slice(limit)) }, `… show all ${text.length} characters`)];
  }

  function fill(node, ...children) {
    node.replaceChildren(...children.flat(2).filter((child) => child !== null && child !== undefined));
  }

  // Addresses: /groups?run=0&step=10, and #groups?run=0&step=10 in a file.
  function here() {
    const text = given ? location.hash.slice(1) : location.pathname.slice(1) + location.search;
    const [view, query] = text.split("?");
    return { view: order.includes(view) ? view : "curves", params: new URLSearchParams(query || "") };
  }

  function address(view, params) {
    const query = new URLSearchParams(Object.entries(params).filter(([, v]) => v !== "" && v !== null && v !== undefined));
    query.delete("token");
    const text = `${view}${query.size ? `?${query}` : ""}`;
    return given ? `#${text}` : `/${text}`;
  }

  function go(view, params, keep) {
    if (given) {
      if (keep) history.replaceState(null, "", address(view, params));
      else { location.hash = address(view, params).slice(1); return; }
    } else history[keep ? "replaceState" : "pushState"](null, "", address(view, params));
    show();
  }

  function link(view, params, attributes, ...children) {
    const take = (event) => {
      if (event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
      event.preventDefault();
      go(view, params);
    };
    return el("a", { href: address(view, params), onclick: take, ...attributes }, ...children);
  }

  // Data.
  async function get(name, params) {
    if (given) return offline(name, params);
    const query = new URLSearchParams();
    for (const [key, value] of Object.entries(params || {})) {
      for (const each of Array.isArray(value) ? value : [value]) {
        if (each !== "" && each !== null && each !== undefined) query.append(key, each);
      }
    }
    const answer = await fetch(`/data/${name}?${query}`, { credentials: "same-origin" });
    const found = await answer.json().catch(() => ({ error: `The server answered ${answer.status}.` }));
    if (found && found.error) throw new Error(found.error);
    return found;
  }

  function offline(name, params) {
    const run = given[Number((params || {}).run || 0)];
    if (name === "runs") return given.map((each) => each.run);
    if (name === "metrics") return Object.fromEntries([params.name].flat().map((n) => [n, run.metrics[n] || [[], []]]));
    if (name === "config") return run.settings;
    if (name === "findings") return run.findings;
    const group = run.groups.find((g) => g.group === Number(params.group) && g.step === Number(params.step));
    if (name === "group" && (group || run.groups.length)) return group || run.groups[0];
    throw new Error("This file does not hold that: see the run itself with python -m podrl.view.");
  }

  // Numbers and names.
  const isShare = (name) => /(answer|partial|format|pass|majority|pair_accuracy)$/.test(name) && !name.includes("_reward");

  // The 95 % interval of a mean of an evaluation, computed as in podrl/rundir/intervals.py; null if there is none.
  function interval(name, mean, error, records) {
    const Z = 1.959964, ROUNDING = 1e-9;
    if (!isShare(name)) return error > ROUNDING * Math.abs(mean) ? [mean - Z * error, mean + Z * error] : null;
    const spread = mean * (1 - mean), known = error > ROUNDING && spread > 0;
    if (!known && !records) return null;
    const n = known ? spread / (error * error * (records ? (records - 1) / records : 1)) : records;
    const scale = 1 + Z * Z / n, middle = (mean + Z * Z / (2 * n)) / scale, half = Z / scale * Math.sqrt(spread / n + Z * Z / (4 * n * n));
    return [mean <= 0 ? 0 : Math.max(middle - half, 0), mean >= 1 ? 1 : Math.min(middle + half, 1)];
  }

  function number(value, digits = 4) {
    if (value === null || value === undefined) return "–";
    if (Number.isInteger(value) && Math.abs(value) < 1e6) return String(value);
    const size = Math.abs(value);
    if (size >= 1e5) return value.toExponential(2);
    if (size && size < 1e-3) return value.toExponential(1);
    return String(Number(value.toPrecision(digits)));
  }

  function time(seconds) {
    if (seconds === null || seconds === undefined) return "";
    if (seconds < 60) return `${Math.round(seconds)} s`;
    const minutes = Math.round(seconds / 60);
    return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  }

  const color = (run) => getComputedStyle(document.documentElement).getPropertyValue(`--run${run % 6}`).trim();

  function save(name, url) {
    el("a", { href: url, download: name }).click();
  }

  // The line of runs, with the most important numbers of each.
  const WANTED = [["accuracy/answer", "accuracy"], ["reward/mean", "reward"], ["sft/loss", "loss"], ["dpo/loss", "loss"],
    ["reward/kl", "KL"], ["actor/kl", "KL"], ["opd/reverse_kl", "KL to the teacher"], ["completion/length_mean", "length"], ["time/step", "a step takes"]];
  const percent = (value) => value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)}\u00a0%`;
  const ABBREVIATED = { seconds: "s", 1: "", reward: "" };
  function measure(value, unit = "") {
    return unit === "share of 1" ? percent(value) : `${number(value, 3)}\u00a0${ABBREVIATED[unit] ?? unit}`.trim();
  }

  function chip(run, index) {
    const progress = run.max_steps ? `step ${run.step} of ${run.max_steps}` : `step ${run.step}`;
    const left = run.left_s && run.state === "running" ? `, ${time(run.left_s)} left` : "";
    const facts = [];
    const before = (run.summary || {}).before || {}, after = (run.summary || {}).after || {};
    const measured = ["greedy_answer", "sampled_answer", "greedy_reward", "sampled_reward"].find((n) => n in after);
    if (measured) {
      const [first, last] = [before, after].map((mean) => interval(measured, mean[measured], mean[`error/${measured}`], mean.records));
      const worse = first && last && last[1] < first[0];
      const [from, to] = [before, after].map((mean) => isShare(measured) ? percent(mean[measured]) : number(mean[measured], 3));
      facts.push(fact(`held-out ${measured.replace("_", " ")}`, `${measured in before ? `${from} → ` : ""}${to}${worse ? ", worse" : ""}`, worse));
    }
    const labels = new Set();
    for (const [name, label] of WANTED) {
      if (facts.length > 4 || run.last[name] === undefined || labels.has(label)) continue;
      labels.add(label);
      facts.push(fact(label, measure(run.last[name], run.units[name])));
    }
    const swatch = el("span", { className: "swatch" });
    swatch.style.background = color(index);
    return el("section", { className: "chip" }, swatch,
      link("run", { run: index }, { className: "name", title: run.place }, run.name),
      el("span", { className: `state ${run.state}` }, run.state === "running" ? "● running" : run.state, given && run.state === "running" ? " when this file was written" : ""),
      el("span", { className: "quiet" }, progress + left), facts,
      [run.note, ...run.problems].filter(Boolean).map((text) => el("span", { className: "problem", role: "alert" }, text)), doctor(index));
  }

  // The findings of podrl.doctor in a run. Closed, they take one line, so that nothing moves when they arrive.
  const found = new Map(), unfolded = new Set();
  function doctor(index) {
    if (!found.has(index)) return el("p", { className: "doctor quiet" }, "Doctor: looking at the records…");
    const { found: said, problem } = found.get(index), run = runs[index];
    const verdict = (kind, word) => el("b", { className: `verdict ${kind}` }, word);
    const steps = `${run.step} step${run.step === 1 ? "" : "s"}`;
    if (problem) return el("p", { className: "doctor" }, verdict("bad", "not examined"), ` Doctor: ${problem}`);
    if (!said.length && !run.step) return el("p", { className: "doctor quiet" }, verdict("", "no step yet"), " The doctor examines steps.");
    if (!said.length && run.step < 10) return el("p", { className: "doctor quiet" }, verdict("", "too early to say"), ` No findings in ${steps}; many checks of the doctor compare 10 steps.`);
    if (!said.length && !["running", "finished"].includes(run.state)) return el("p", { className: "doctor quiet" }, verdict("", "no findings"), ` in ${steps}.`);
    if (!said.length) return el("p", { className: "doctor well" }, verdict("well", "✓ healthy"), ` No findings in ${steps}.`);
    const details = el("details", { className: "doctor", open: unfolded.has(index), ontoggle: () => unfolded[details.open ? "add" : "delete"](index) },
      el("summary", {}, verdict("bad", `✗ ${said.length} finding${said.length > 1 ? "s" : ""}`), " ",
        said.map((each) => `step ${each.step}, ${each.name}`).join(" · ")),
      said.map((each) => el("div", { className: "finding" }, el("b", {}, `Step ${each.step}: ${each.name}. `), `${each.text}.`, el("br"),
        `It means: ${each.meaning}.`, el("br"), `Turn: ${each.key}.`, each.sample ? ` (${each.sample})` : "")));
    return details;
  }

  async function examine() {
    for (let index = 0; index < runs.length; index++) {
      found.set(index, await get("findings", { run: index }).catch((error) => ({ problem: error.message })));
      const shown = document.querySelectorAll(".chip .doctor")[index];
      if (shown) shown.replaceWith(doctor(index)); // replaces nothing else, so that the focus stays where it is
    }
  }

  const fact = (label, value, bad) => el("span", { className: "fact" }, el("span", { className: "quiet" }, label), " ", el("b", { className: bad ? "problem" : "" }, value));

  function head() {
    const { view, params } = here();
    const kept = params.get("run") ? { run: params.get("run") } : {};
    const links = order.map((name) => link(name, kept, { "aria-current": name === view ? "page" : null }, name));
    const top = document.getElementById("top");
    top.className = runs.length > 3 ? "many" : ""; // a tall header scrolls away with the page
    fill(top, el("nav", { ariaLabel: "views" }, el("b", { className: "brand" }, "podrl"), links),
      el("div", { className: "chips" }, runs.map(chip)));
    document.title = `${runs.map((r) => r.name).join(", ")} · ${view}`;
  }

  async function show() {
    const turn = ++shown, main = document.getElementById("view");
    leave();
    leave = () => {};
    head();
    const { view, params } = here();
    try {
      const left = await views[view](main, params, () => turn === shown);
      if (turn === shown) leave = left || leave;
    } catch (error) {
      if (turn === shown) fill(main, el("p", { className: "problem", role: "alert" }, error.message));
    }
  }

  // While a run goes on: the functions passed to `watch` are called when there is a new step.
  const watchers = new Set();
  async function poll() {
    try {
      const found = await get("runs"), before = JSON.stringify(runs.map((r) => [r.step, r.metrics.length, r.traced.length]));
      runs.splice(0, runs.length, ...found);
      head();
      if (before !== JSON.stringify(runs.map((r) => [r.step, r.metrics.length, r.traced.length]))) for (const each of watchers) each();
      if (examined !== JSON.stringify(runs.map((r) => r.step))) { examined = JSON.stringify(runs.map((r) => r.step)); await examine(); }
    } catch (error) { /* the server has ended: the page keeps its contents */ }
    setTimeout(poll, runs.some((r) => r.state === "running") ? 3000 : 15000);
  }

  async function begin() {
    window.addEventListener(given ? "hashchange" : "popstate", show);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
    try { runs = await get("runs"); } catch (error) {
      document.getElementById("view").replaceChildren(el("p", { className: "problem" }, error.message));
      return;
    }
    if (given) await examine();
    await show();
    document.body.dataset.ready = "yes";
    if (given) return;
    examined = JSON.stringify(runs.map((r) => r.step));
    setTimeout(poll, 3000);
    await examine();
  }

  function watch(look) {
    watchers.add(look);
    return () => watchers.delete(look);
  }

  function pick(label, values, value, changed, texts) {
    const options = values.map((each, i) => el("option", { value: each, selected: String(each) === String(value) }, texts ? texts[i] : String(each)));
    return el("label", {}, label, " ", el("select", { onchange: (event) => changed(event.target.value) }, options));
  }

  function runPick(view, params) {
    if (runs.length < 2) return null;
    return pick("run", runs.map((_, i) => i), params.get("run") || 0, (run) => go(view, { run }), runs.map((r) => r.name));
  }

  return { el, long, fill, get, go, link, here, number, interval, isShare, time, color, save, views, watch, pick, runPick, begin, address, get runs() { return runs; }, offline: !!given };
})();
