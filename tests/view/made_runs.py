"""Run directories for tests of podrl.view, written by podrl's own writers without training."""

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "learner"))
from test_experience import _experience
from test_trace import Words, extras

from podrl.rundir import identity
from podrl.rundir.about import About, Table, write_about
from podrl.rundir.metrics import LogConfig, MetricsLog
from podrl.rundir.tracing import TraceSteps, Tracing
from podrl.storage import lock

HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"


def made(path, *, steps, max_steps=12, seed=0, trace="sampled", note=extras):
    """Writes a run directory with `steps` of `max_steps` steps.

    If these numbers are equal, the run has its summary.json; otherwise this process is the run's.
    """
    config = LogConfig(to=(), trace=trace)
    log = MetricsLog(path, config, start=0, run_config={})
    log.write(0, {"eval/greedy_answer": 0.25, "eval/error/greedy_answer": 0.02})
    tracing = None if trace == "off" else Tracing(path, config, start=0)
    experience = hostile(seed)
    for step in range(1, steps + 1):
        values = {"reward/mean": step / 10, "accuracy/answer": 0.5, "time/step": 0.5, "odd": 9.0 if step == 7 else 0.0}
        log.write(step, values | {"actor/lr": 5e-6, "never/finite": float("nan")})
        if tracing is not None:
            if TraceSteps(config).wants(step):
                tracing.note(step, note(experience))
            tracing.record(step, experience, spans(step), Words())
        if step == 1:
            log.write_samples(step, [{"prompt": "p", "completion": HOSTILE, "truth": 0, "reward": 1.0, "exact": 1.0}])
    if steps == max_steps:
        log.write(steps, {"eval/greedy_answer": 0.5, "eval/error/greedy_answer": 0.03})
        after = {"greedy_answer": 0.5, "error/greedy_answer": 0.03}
        summary = {"steps": steps, "before": {"greedy_answer": 0.25}, "after": after, "seconds": {"step": 6.0}}
        (path / "summary.json").write_text(json.dumps(summary))
    else:
        (path / lock.NAME).write_text(lock.Owner.me().text())
    log.close()
    if tracing is not None:
        tracing.close()
    same = {"algorithm": "grpo", "grpo": {"epsilon": 0.2}, "data": {"path": "gsm8k"}}  # a job has data, a learner none
    identity.write(path, same | {"trainer": {"max_steps": max_steps}}, same | {"trainer": {"max_steps": None}})
    roles = Table("Roles (8 x cpu)", ["role", "does"], [["trainer", f"updates {HOSTILE}"], ["rollout", "x" * 80]])
    write_about(path, About([roles], ["A long sentence. " * 20, "  r = exp(logprob - old_logprob)"]))
    return path


def weighed(experience):
    """Returns the trace's columns for a step with token weights: tokens of high advantage are clipped in half the
    passes."""
    told = extras(experience)
    advantage_BT = told.columns["advantage"]
    clipped_BT = np.where(advantage_BT >= 16, 0.5, 0.0)
    weights = {"weight": advantage_BT * (1 - clipped_BT) - 4, "clipped": clipped_BT}
    return dataclasses.replace(told, columns={**told.columns, **weights})


def hostile(seed):
    """Returns samples whose texts are HTML, which the page must show as text."""
    experience = _experience(seed)
    texts = {
        "completions": [HOSTILE, "x", "y", "z"],
        "prompts": dataclasses.replace(experience.rollouts.prompts, text=["a", "b"]),
    }
    return dataclasses.replace(experience, rollouts=dataclasses.replace(experience.rollouts, **texts))


def spans(step):
    """Returns the spans of a step of half a second: generation, then an update that begins with scoring."""
    start = 1000.0 + 0.5 * step

    def span(lane, name, after, seconds):
        return {"step": step, "host": "trainer 0", "lane": lane, "name": name, "start": start + after, "s": seconds}

    waited, made = span("loop", "rollout", 0.0, 0.2), span("rollout", "rollout", 0.0, 0.2)
    return [made, waited, span("trainer", "score", 0.2, 0.05), span("loop", "update", 0.2, 0.3)]


def with_tools(path):
    """Writes a run of two hosts, with a plan; its samples call tools, and some calls fail."""
    made(path, steps=12, max_steps=12, note=weighed)
    with (path / "spans.jsonl").open("a") as file:
        for step in range(1, 13):
            for i in range(6):
                call = {"step": step, "host": "rollout 0", "lane": "tools", "name": HOSTILE if i == 5 else "search"}
                call |= {"start": 1000.0 + 0.5 * step + 0.02 * i, "s": 0.07} | (
                    {"failed": "deadline"} if i == 2 else {}
                )
                file.write(json.dumps(call) + "\n")
            generated = spans(step)[0] | {"host": "rollout 0"}
            file.write(json.dumps(generated | {"left_out": 3}) + "\n")
    plan = {"trainer": "v5e:2x2", "step": {"step_s": 0.25, "rollout_s": 0.1, "trainer_s": 0.1, "move_s": 0.0}}
    plan["programs"] = [{"peak": 2 * 2**30, "resident": 2**30}, {"peak": 2**30, "resident": 0}, None]
    (path / "plan.json").write_text(json.dumps(plan))
    return path


def damaged(path):
    """Writes a run directory in which a line, the configuration and a trace file are broken."""
    made(path, steps=12, max_steps=12)
    lines = (path / "metrics.jsonl").read_text().splitlines()
    lines[3] = lines[3][:20]
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (path / "config.json").write_text("{")
    trace = path / "trace" / "step_00000010.npz"
    trace.write_bytes(trace.read_bytes()[:300])
    return path
