"use strict";
podrl.views.groups = async (main, params, current) => {
  const { el, fill, get, go, link, long, number, pick, runPick, runs } = podrl;
  const run = Number(params.get("run") || 0), traced = (runs[run] || { traced: [] }).traced;
  if (!traced.length) {
    fill(main, el("div", { className: "bar" }, runPick("groups", params)), el("p", { className: "quiet" }, "This run has no trace of samples: log.trace='off', a run on given answers, or no step yet."));
    return null;
  }
  const step = Number(params.get("step") || traced[traced.length - 1]), by = params.get("by") || "logprob";
  const at = (more) => ({ run, step, group: group.group, by, ...more });
  let group;
  try { group = await get("group", { run, step, group: params.get("group") ?? -1 }); } catch (error) {
    fill(main, el("div", { className: "bar" }, runPick("groups", params), pick("step", traced, step, (to) => go("groups", { run, step: to, by }))),
      el("p", { className: "problem", role: "alert" }, error.message));
    return null;
  }
  if (!current()) return null;

  const MODES = [["logprob", "log-probability"], ["difference", "trainer − sampler"], ["entropy", "entropy (trainer)"], ["advantage", "advantage"], ["weight", "weight in the update"], ["clip", "clipped at the first update"],
    ["clipped", "clipped, share of the passes"], ["version", "version of the weights"], ["kept", "share kept by top-k, top-p"], ["return", "return (critic)"], ["turn_reward", "reward of turns"]];
  const value = (sample, i, mode) => {
    const t = sample.tokens;
    if (mode === "difference") return t.trainer_logprob[i] === null ? null : t.trainer_logprob[i] - t.logprob[i];
    if (mode === "clip") {
      if (t.trainer_logprob[i] === null) return null;
      const ratio = Math.exp(t.trainer_logprob[i] - t.logprob[i]), gain = (t.advantage || [])[i];
      return gain > 0 && ratio > 1 + group.clip[1] ? 1 : gain < 0 && ratio < 1 - group.clip[0] ? -1 : 0;
    }
    return (t[mode] || [])[i] ?? null;
  };
  const there = MODES.filter(([mode]) => ["logprob", "difference", "clip", "weight"].includes(mode) || group.samples.some((sample) => sample.tokens[mode]));
  const own = group.samples.flatMap((sample) => sample.ids.map((_, i) => (sample.tokens.mask[i] ? value(sample, i, by) : null)).filter((v) => v !== null));
  const most = own.reduce((high, v) => Math.max(high, Math.abs(v)), 0), versions = [...new Set(by === "version" ? own : [])].sort((a, b) => a - b);
  const shade = (v) => {
    if (v === null) return "";
    if (by === "version") return `hsl(${versions.indexOf(v) * 137 % 360} 70% 50% / 0.3)`;
    const part = by === "kept" ? 1 - v : most ? Math.abs(v) / most : 0;
    return part < 0.005 ? "" : `rgb(${v < 0 || by === "kept" ? "230 90 40" : "50 120 230"} / ${(0.06 + 0.54 * part).toFixed(3)})`;
  };
  const scale = by === "version" ? `versions ${versions.join(", ")}` : own.length ? `strongest colour: ${number(most)}; orange below 0, blue above` : by === "weight" ? "not recorded: log.trace='updates' records it, and podrl.replay --change has it of a step that is done again" : `not recorded for this group${group.scored && ["difference", "clip", "entropy"].includes(by) ? `: of this step the trainer scored ${group.scored > 1 ? `groups 0 to ${group.scored - 1}` : "group 0"} (log.trace='all' scores every one)` : ""}`;

  const detail = el("output", { className: "detail" }, "Point at a token, or walk with the arrow keys, to see its numbers.");
  function tell(sample, i) {
    const t = sample.tokens;
    const said = Object.entries(t).filter(([name]) => name !== "mask" && name !== "trained").map(([name, values]) => `${name.replaceAll("_", " ")} ${number(values[i])}`);
    const mark = !t.mask[i] ? "given, not sampled" : t.trained && !t.trained[i] ? "not trained on" : "sampled";
    const diff = value(sample, i, "difference");
    detail.textContent = `sample ${sample.index % group.samples.length}, token ${i}: ${JSON.stringify(sample.text[i])} (id ${sample.ids[i]}), ${mark} · ${said.join(" · ")}${diff === null ? "" : ` · ratio ${number(Math.exp(diff), 6)}`}`;
  }

  function tokens(sample) {
    const box = el("div", { className: "tokens", tabIndex: 0, role: "group", ariaLabel: `tokens of sample ${sample.index % group.samples.length}` });
    const from = Math.min(sample.prompt_length, sample.length), parts = [];
    const LIMIT = 6000;
    for (let i = from; i < Math.min(sample.length, from + LIMIT); i++) {
      const part = el("span", { className: sample.tokens.mask[i] ? (sample.tokens.trained && !sample.tokens.trained[i] ? "off" : "") : "given" }, sample.text[i]);
      part.style.backgroundColor = sample.tokens.mask[i] ? shade(value(sample, i, by)) : "";
      part.dataset.i = i;
      parts.push(part);
      const piece = sample.tokens.piece; // traces of older runs have none
      if (piece && i > 0 && piece[i] !== piece[i - 1]) box.append(el("div", { className: "quiet" }, `piece ${piece[i]}, a context of its own`));
      box.append(part);
    }
    if (sample.length > from + LIMIT) box.append(el("span", { className: "quiet" }, ` … ${sample.length - from - LIMIT} more tokens`));
    let at = -1;
    const choose = (i) => { if (parts[at]) parts[at].classList.remove("at"); at = i; if (parts[at]) { parts[at].classList.add("at"); tell(sample, from + at); } };
    box.addEventListener("pointerover", (event) => { if (event.target.dataset.i) choose(Number(event.target.dataset.i) - from); });
    box.addEventListener("keydown", (event) => {
      const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: parts.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      choose(Math.max(0, Math.min(to, parts.length - 1)));
    });
    const wanted = Number(params.get("token"));
    if (params.get("token") && String(sample.index % group.samples.length) === params.get("sample")) setTimeout(() => choose(wanted - from));
    return box;
  }

  const turns = (sample) => sample.turns.filter((turn) => turn.by !== "model").map((turn) =>
    el("div", { className: turn.failed ? "turn problem" : "turn" }, el("b", {}, String(turn.by)), ` ${turn.failed ? `failed: ${turn.failed} · ` : ""}${number(turn.seconds, 3)} s `, el("span", { className: "quiet" }, long(String(turn.text), 300))));
  const card = (sample) => {
    const place = sample.index % group.samples.length;
    return el("article", { className: `sample${String(place) === params.get("sample") ? " wanted" : ""}`, id: `sample${place}` },
      el("h3", {}, `sample ${place}`, el("span", { className: "reward" }, number(sample.reward, 3))),
      el("p", { className: "quiet" }, group.reward_names.map((name, i) => `${name} ${number(sample.rewards[i], 3)}`).join(" · ")),
      el("p", { className: "quiet" }, `${sample.length - sample.prompt_length} tokens · ended by ${sample.stop} · mismatch ${number(sample.mismatch, 2)} nats`),
      turns(sample), tokens(sample));
  };

  const rewards = group.rewards.map((reward) => reward ?? 0), low = Math.min(...rewards), high = Math.max(...rewards);
  const strip = group.rewards.map((reward, g) => {
    const made = link("groups", at({ group: g }), { className: "cell", title: `group ${g}: mean reward ${number(reward)}`, "aria-current": g === group.group ? "true" : null }, String(g));
    made.style.backgroundColor = `rgb(50 120 230 / ${(0.08 + 0.6 * ((reward ?? low) - low) / (high - low || 1)).toFixed(3)})`;
    return made;
  });
  const fields = Object.entries(group.fields).map(([name, content]) => `${name}: ${String(content)}`);
  fill(main,
    el("div", { className: "bar" }, runPick("groups", params), pick("step", traced, step, (to) => go("groups", { run, step: to, by })),
      pick("colour", there.map(([mode]) => mode), by, (to) => go("groups", at({ by: to })), there.map(([, text]) => text)), el("span", { className: "quiet" }, scale)),
    el("nav", { className: "strip", ariaLabel: "groups of the step, bluer for a higher mean reward" }, podrl.offline ? null : strip),
    el("details", { className: "prompt", open: true }, el("summary", {}, `prompt of group ${group.group}`), el("pre", {}, group.prompt), fields.length ? el("pre", { className: "quiet" }, fields.join("\n")) : null),
    el("div", { className: "samples" }, group.samples.map(card)), detail);
  if (params.get("sample")) { const found = document.getElementById(`sample${Number(params.get("sample"))}`); if (found) found.scrollIntoView({ block: "nearest" }); }
  return null;
};
