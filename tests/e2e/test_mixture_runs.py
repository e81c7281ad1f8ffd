"""A job on a mixture of sources that is killed and resumed ends bitwise as an undisturbed run."""

import json
import re
import subprocess

import pytest
from metric_names import ROOT
from processes import TWO_DEVICES, environment, job, run, same_end, trained_steps

pytestmark = pytest.mark.e2e


@pytest.mark.nightly("podrl/data/mixture.py", "podrl/data/pipeline.py")
def test_a_mixture_killed_between_two_checkpoints_ends_as_an_undisturbed_run(tmp_path):
    """Kills a whole job once; tests/data/test_mixtures.py tests that the stream of a mixture resumes at any batch."""
    rows = [{"task": f"Ann has {i} pens.{' She counts.' * (i % 9)}", "answer": f"{i}", "id": i} for i in range(40)]
    (tmp_path / "pens.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.py").write_text(
        "def few(record):\n    return record if record['id'] < 30 else None\n"
        "def short(prompts, completions, dataset, group, **fields):\n"
        "    assert set(dataset) == {'pens'} and set(group) == {'counting'}\n"
        "    return [-0.01 * len(text) for text in completions]\n"
    )
    pens = {
        "path": str(tmp_path / "pens.jsonl"),
        "weight": 1.0,
        "question_field": "task",
        "group": "counting",
        "reward": (f"{tmp_path / 'mine.py'}:short",),
        "transforms": ({"map": f"{tmp_path / 'mine.py'}:few"},),
    }
    flags = [
        f"--config.data.sources={({'path': 'problems', 'weight': 2.0}, pens)!r}",
        "--config.eval.problems=8",
        TWO_DEVICES,
    ]
    flags += [f"--config.data.cache={tmp_path / 'cache'}", "--config.rollout.max_prompt_length=64"]
    whole = run(tmp_path / "whole" / "run", *flags)
    workdir = tmp_path / "killed" / "run"
    with job(workdir, *flags) as started:
        started.wait_for_step(3)
        started.wait_for("a checkpoint", (workdir / "checkpoints" / "2").exists)  # a thread writes it
        started.kill()
    assert "Resumed after step" in run(workdir, *flags).stdout
    same_end(workdir, whole.workdir)
    assert trained_steps(workdir) == [1, 2, 3, 4, 5, 6]
    told = [json.loads((place / "sources.json").read_text()) for place in (workdir, whole.workdir)]
    assert told[0] == told[1]
    assert [(row["source"], row["share"]) for row in told[0]] == [("problems", 0.666667), ("pens", 0.333333)]
    assert told[0][1]["records"] == 40 and told[0][1]["map few"] == 10 and told[0][1]["too long"] > 0
    assert "Sources" in whole.stdout and "66.7%" in whole.stdout
    shown = [record for record in whole.records() if "reward/short/mean" in record or "reward/short" in record]
    assert shown, sorted(whole.records()[-2])


@pytest.mark.nightly("docs/data.md", "podrl/data/mixture.py")
def test_the_mixture_of_the_data_page_runs_as_it_is_printed(tmp_path):
    page = (ROOT / "docs" / "data.md").read_text().partition("## A mixture")[2]
    (tmp_path / "mine.py").write_text(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0])
    rows = [{"task": f"Ann has {i} pens. How many?", "result": f"{i}", "id": i} for i in range(40)]
    (tmp_path / "pens.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    script = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)[0]
    given = environment(XDG_CACHE_HOME=str(tmp_path / "cache"))
    done = subprocess.run(
        ["bash", "-e", "-c", script], cwd=tmp_path, env=given, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout[done.stdout.rindex("\n[\n") :])
    assert [row["source"] for row in rows] == ["problems", "pens"] and rows[1]["map few"] == 10, rows


@pytest.mark.nightly("podrl/learner/grpo.py", "podrl/learner/settings.py", "podrl/algorithms/policy_loss.py", "configs")
def test_sources_with_algorithms_of_their_own_train_in_one_update(tmp_path):
    """The sources are RL with a calculator, cross-entropy on the calculator's answers, and the policy as its own
    teacher, which sees a hint."""
    few = ("--config.trainer.max_steps=2", "--config.trainer.eval_every_n_steps=0", "--config.checkpoint.every=2")
    done = run(tmp_path / "run", base=("--config=grpo_tools.py:mixture", *few, "--config.log.to=()"))
    steps = [record for record in done.records() if "actor/grad_norm" in record]
    assert len(steps) == 2
    for step in steps:
        assert all(step[f"loss/tokens/{name}"] > 0 for name in ("rl", "teacher", "ce")), step
        assert step["source/sums/samples"] == 64 and step["source/by_heart/samples"] == 32
        assert 0 < step["actor/grad_norm"] < 100 and step["opd/reverse_kl"] > 0 and step["echo/nll"] > 0
