"""Curricula in jobs: retired prompts stay away, postponed ones come again, killed runs end bitwise the same."""

import ast
import itertools
import json
import re
import subprocess

import pytest
from metric_names import ROOT
from processes import TWO_DEVICES, environment, job, run, same_end, trained_steps

pytestmark = pytest.mark.e2e
RULES = (
    *(
        "--config.eval.problems=0",
        "--config.log.samples_every=1",
        "--config.log.samples=4",
        "--config.grpo.max_staleness=1",
    ),
    *("--config.data.curriculum.retire_after=1", "--config.data.curriculum.metric=by_number"),
    *("--config.data.curriculum.postpone_after=1", "--config.data.curriculum.postpone_steps=3"),
    *("--config.data.curriculum.hard_share=0.25", "--config.trainer.max_steps=6"),
)


@pytest.mark.nightly("podrl/data/curriculum.py")
def test_what_is_solved_stays_away_what_is_not_comes_again_and_a_killed_run_ends_bitwise_the_same(tmp_path):
    rows = [{"question": f"Ann has {i} pens. How many?", "answer": f"{i}", "id": i} for i in range(24)]
    (tmp_path / "pens.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.py").write_text(
        "def by_number(prompts, completions, id, **fields):\n"
        "    return [(1.0, len(c) % 2, 0.0)[i % 3] for i, c in zip(id, completions)]\n"
    )
    flags = (
        *RULES,
        TWO_DEVICES,
        f"--config.data.path={tmp_path / 'pens.jsonl'}",
        "--config.data.eval_fraction=0.0",
        "--config.data.system_prompt=",
    )
    flags += (f"--config.reward.fns=('{tmp_path / 'mine.py'}:by_number',)",)
    whole, workdir = tmp_path / "whole" / "run", tmp_path / "killed" / "run"
    run(whole, *flags)
    visits: dict[int, list[int]] = {}
    for sample in map(json.loads, (whole / "samples.jsonl").read_text().splitlines()):
        number = re.findall(r"has (\d+) pens", sample["prompt"])[-1]
        visits.setdefault(int(number), []).append(sample["step"])
    assert sum(map(len, visits.values())) == 24
    assert all(len(steps) == 1 for i, steps in visits.items() if i % 3 == 0), visits
    failed = [steps for i, steps in visits.items() if i % 3 == 2]
    assert any(len(steps) > 1 for steps in failed), visits
    assert all(later - step >= 3 for steps in failed for step, later in itertools.pairwise(steps)), visits
    with job(workdir, *flags) as started:
        started.wait_for_step(3)
        started.kill()
    run(workdir, *flags)
    same_end(workdir, whole)
    assert trained_steps(workdir) == list(range(1, 7))


@pytest.mark.nightly("docs/data.md", "podrl/data/curriculum.py")
def test_the_curriculum_of_the_data_page_runs_as_it_is_printed(tmp_path):
    page = (ROOT / "docs" / "data.md").read_text().partition("## A curriculum")[2]
    script = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)[0].replace(".py ", ".py --config.eval.problems=0 ")
    done = subprocess.run(
        ["bash", "-e", "-c", script],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    sizes = ast.literal_eval(done.stdout.splitlines()[-1])
    assert len(sizes) == 6 and sum(sizes.values()) == 40 and sizes["data/curriculum/unseen"] < 40, sizes
