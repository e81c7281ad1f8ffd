"""Settings that may and may not change when a run resumes. All may change after a start that made no step."""

import copy
import io
import json

import jax.numpy as jnp
import pytest
import rich.console
from ml_collections import ConfigDict
from processes import SMALL, TWO_DEVICES, comparable, run, trained_steps

from podrl.algorithms.presets import PRESETS
from podrl.job.config import complete, parse, unset
from podrl.rundir import identity
from podrl.rundir.metrics import LogConfig
from podrl.rundir.run import Run
from podrl.storage.bits import tree_sums
from podrl.storage.checkpoint import read_state

_QUIET = LogConfig(to=())


def _config(**changed) -> dict:
    """Makes the configuration of a job as config.json holds it; names have '__' for dots."""
    trainer = {"eval_every_n_steps": 0, "max_steps": 6, "schedule": changed.pop("schedule", "constant")}
    trainer["warmup_fraction"] = changed.pop("warmup", 0.0)
    filled = ConfigDict(complete({"algorithm": "grpo", "trainer": trainer})).to_dict()
    values = json.loads(json.dumps(parse(filled).as_mapping()))
    for name, value in changed.items():
        *groups, key = name.split("__")
        node = values
        for group in groups:
            node = node[group]
        node[key] = value
    return values


_LIMIT = "samples that meet this limit may get other rewards than before"
_DEFAULTS = json.loads(json.dumps(unset("grpo")))


@pytest.mark.parametrize(
    ("there", "here", "allowed", "refused"),
    [
        ({}, {}, [], []),
        ({}, {"trainer__max_steps": 9}, ["trainer.max_steps was 6, now 9"], []),
        ({}, {"trainer__eval_every_n_steps": 3}, ["trainer.eval_every_n_steps was 0, now 3"], []),
        ({}, {"checkpoint__every": 7, "checkpoint__keep": 5}, ["checkpoint.every", "checkpoint.keep"], []),
        ({}, {"log__samples_every": 0, "log__stall_s": 9.0}, ["log.samples_every", "log.stall_s"], []),
        ({}, {"reward__deadline_s": 60.0, "reward__judge__timeout_s": 5.0}, ["reward.deadline_s", "reward.judge"], []),
        ({}, {"reward__limits__memory_mb": 512}, [f"reward.limits.memory_mb was 16384, now 512 ({_LIMIT})"], []),
        ({}, {"reward__code__cpu_s": 10}, [f"reward.code.cpu_s was 5, now 10 ({_LIMIT})"], []),
        ({}, {"reward__code__memory_mb": 1024}, [f"reward.code.memory_mb was 512, now 1024 ({_LIMIT})"], []),
        ({}, {"reward__code__score": "share"}, [], ["reward.code.score was 'all', now 'share'"]),
        ({}, {"env__call_deadline_s": 9.0}, [f"env.call_deadline_s was 30.0, now 9.0 ({_LIMIT})"], []),
        (
            {},
            {"reward__named": ["length"]},
            [],
            ["reward.named was [], now ['length'] (functions that data.sources, eval.sets"],
        ),
        ({}, {"env__workers": 2, "env__processes": 4}, ["env.processes", "env.workers was 1, now 2"], []),
        ({}, {"grpo__mismatch_patience": 0}, ["grpo.mismatch_patience was 5, now 0"], []),
        ({}, {"trainer__offload": "reference"}, ["trainer.offload was 'none', now 'reference'"], []),
        ({"trainer__offload": "all"}, {"trainer__offload": "optimizer"}, ["trainer.offload"], []),
        ({}, {"trainer__offload": "all"}, [], ["trainer.offload was 'none', now 'all'"]),
        ({}, {"rollout__lanes": 64}, [], ["rollout.lanes"]),
        ({}, {"seed": 1}, [], ["seed was 0, now 1"]),
        ({}, {"trainer__learning_rate": 1.0}, [], ["trainer.learning_rate"]),
        ({}, {"rollout__temperature": 0.5}, [], ["rollout.temperature"]),
        ({}, {"data__path": "other.jsonl"}, [], ["data.path"]),
        (
            {"schedule": "cosine"},
            {"schedule": "cosine", "trainer__max_steps": 9},
            [],
            ["trainer.max_steps was 6, now 9 (trainer.schedule='cosine' spans all steps)"],
        ),
        (
            {"warmup": 0.1},
            {"warmup": 0.1, "trainer__max_steps": 9},
            [],
            ["trainer.max_steps was 6, now 9 (trainer.warmup_fraction=0.1 spans all steps)"],
        ),
        ({}, {"schedule": "cosine", "trainer__max_steps": 9}, [], ["trainer.max_steps", "trainer.schedule"]),
    ],
)
def test_which_keys_may_change(there, here, allowed, refused):
    found = identity.changes(_config(**there), _config(**here), _DEFAULTS)
    for texts, expected in zip(found, (allowed, refused), strict=True):
        assert len(texts) == len(expected) and all(t.startswith(e) for t, e in zip(texts, expected, strict=True))


def test_every_limit_that_may_change_is_a_key():
    def keys(node, prefix=""):
        for name, value in node.items():
            yield from keys(value, f"{prefix}{name}.") if isinstance(value, dict) else [f"{prefix}{name}"]

    known = list(keys(_config()))
    assert all(any(key.startswith(limit) for key in known) for limit in identity._LIMITS)


def test_a_key_the_saved_run_does_not_know_had_its_default_there():
    """Removes every key that has a default, one at a time; then whole groups of keys."""

    def leaves(node, path=()):
        for key, value in node.items():
            yield from leaves(value, (*path, key)) if isinstance(value, dict) else [(*path, key)]

    mine, taken = _config(), 0
    for path in [*leaves(mine), *((group,) for group in mine if isinstance(mine[group], dict))]:
        theirs, known = copy.deepcopy(mine), _DEFAULTS
        node, default = theirs, known
        for key in path[:-1]:
            node, default = node[key], default.get(key, {})
        value = node.pop(path[-1])
        if isinstance(value, dict) or default.get(path[-1], "none") != value:
            continue  # the job does not have the default, so a missing key counts as a change
        taken += 1
        assert identity.changes(theirs, mine, known) == ([], []), path
    assert taken > 100
    del theirs, node
    theirs = _config()
    del theirs["rollout"]["temperature"], theirs["reward"]["judge"]
    mine["rollout"]["temperature"] = 0.25
    default = _DEFAULTS["rollout"]["temperature"]
    assert identity.changes(theirs, mine, _DEFAULTS) == ([], [f"rollout.temperature was {default!r}, now 0.25"])


@pytest.mark.parametrize("algorithm", [*PRESETS, "sft", "dpo", "orpo", "kto", "reward_model"])
def test_any_section_may_be_new_whatever_the_algorithm_makes_its_defaults(algorithm):
    """A saved run may lack any section. Presets, and algorithms that learn from the data's answers, change the defaults
    of sections."""
    given = {"algorithm": algorithm, "trainer": {"eval_every_n_steps": 0, "max_steps": 6}}
    filled = complete(given | ({"model": {"reference": "teacher"}} if algorithm == "opd" else {}))
    mine, known = (
        json.loads(json.dumps(values))
        for values in (parse(ConfigDict(filled).to_dict()).as_mapping(), unset(algorithm))
    )
    mine["model"]["reference"] = ""  # the key of the teacher has no default
    sections = [name for name, value in mine.items() if isinstance(value, dict) and name != "trainer"]
    assert len(sections) >= 8
    for name in sections:
        theirs = {key: value for key, value in mine.items() if key != name}
        assert identity.changes(theirs, mine, known) == ([], []), name
        assert list(identity.unknown(theirs, mine)) == [name]


def test_a_key_that_is_known_no_more_is_refused():
    theirs = _config()
    theirs["rollout"]["forgotten"] = 3
    assert identity.changes(theirs, _config(), _DEFAULTS) == ([], ["rollout.forgotten was 3, now '(absent)'"])
    theirs = _config() | {"ppo": {"gamma": 1.0}}  # earlier versions wrote this key for every algorithm
    assert identity.changes(theirs, _config(), _DEFAULTS) == ([], [])


def _start(path, config, *, step=0, record=False, defaults=None) -> str:
    """Starts a run for a short time; returns its output without the lines about slow stages of a busy machine."""
    said = io.StringIO()
    with Run(
        path, config=config, defaults=defaults, log=_QUIET, console=rich.console.Console(file=said, width=999)
    ) as run:
        run.open_metrics(0)
        assert run.metrics is not None and run.checkpoints is not None
        run.metrics.write(0, {"eval/answer": 0.5})
        if record:
            run.metrics.write(1, {"time/step": 0.5})
        if step:
            run.checkpoints.save(step, {"w": jnp.ones(3)}, {}, {})
    return "".join(line for line in said.getvalue().splitlines(keepends=True) if " so far) ..." not in line)


def test_a_start_without_a_step_binds_nothing(tmp_path):
    """A start without a finished step may have written its configuration, evaluated, or failed in the first step. The
    next start may have another configuration."""
    _start(tmp_path, {"seed": 1})
    _start(tmp_path, {"seed": 2}, record=True)
    with pytest.raises(ValueError, match="another configuration: seed was 2, now 3"):
        Run(tmp_path, config={"seed": 3})


def test_what_changed_is_said_in_one_line_and_kept(tmp_path):
    assert _start(tmp_path, {"seed": 1, "log": {"samples": 4}}, step=1) == ""
    more = {"seed": 1, "log": {"samples": 9}}
    assert _start(tmp_path, more) == "Changed since this run was last started: log.samples was 4, now 9.\n"
    assert json.loads((tmp_path / "config.json").read_text())["log"] == {"samples": 9}
    assert _start(tmp_path, more) == ""


def test_keys_that_are_new_in_this_version_are_named_once(tmp_path):
    known = {"seed": 1, "log": {"samples": 4, "stall_s": 9.0}, "env": {"tools": "", "turns": 3}}
    old = {"seed": 1, "log": {"samples": 4}}
    _start(tmp_path, old, step=1)
    said = _start(tmp_path, known, defaults=known)
    assert said == (
        "Keys that are new since this run was last started; its steps so far count as made with their defaults: "
        "env, log.stall_s.\n"
    )
    assert _start(tmp_path, known, defaults=known) == ""
    _start(tmp_path / "other", old, step=1)
    with pytest.raises(ValueError, match=r"another configuration: env\.turns was 3, now 4\."):
        Run(tmp_path / "other", config=known | {"env": {"tools": "", "turns": 4}}, defaults=known)


@pytest.mark.nightly("podrl/job/alike.py")
@pytest.mark.e2e
def test_a_corrected_command_starts_and_a_run_is_made_longer_but_not_shorter(tmp_path):
    small = (*SMALL, TWO_DEVICES, "--config.eval.problems=0", "--config.checkpoint.every=0")
    failed = run(tmp_path / "run", "--config.rollout.lanes=0", base=small, code=1)
    assert "lanes" in failed.stderr
    bad = run(tmp_path / "run", "--config.data.path=nowhere.jsonl", base=small, code=1)
    assert "nowhere.jsonl" in bad.stderr
    run(tmp_path / "run", "--config.trainer.max_steps=2", base=small)
    longer = run(tmp_path / "run", "--config.trainer.max_steps=4", "--config.log.samples_every=1", base=small)
    assert "trainer.max_steps was 2, now 4" in longer.stdout and "Resumed after step 2" in longer.stdout
    shorter = run(tmp_path / "run", "--config.trainer.max_steps=3", base=small, code=1)
    assert "holds 4 steps, more than trainer.max_steps=3: set trainer.max_steps to at least 4" in shorter.stderr
    whole = run(tmp_path / "whole", "--config.trainer.max_steps=4", base=small).workdir
    assert comparable(whole) == comparable(tmp_path / "run") and trained_steps(whole) == [1, 2, 3, 4]
    (step, state), (other, same) = (read_state(path / "checkpoints") for path in (whole, tmp_path / "run"))
    assert step == other == 4
    assert tree_sums(state) == tree_sums(same)


def test_a_run_of_before_counted_the_sequences_of_an_update():
    """The old key counted sequences: it is converted into prompts, so an equal number in the new key is a change."""

    def saved(size, **grpo):
        return {"trainer": {"mini_batch_size": size}, "grpo": {"num_generations": 4, **grpo}}

    now = {"policy_loss_args": {}}
    known = {"grpo": now}
    assert identity.changes(saved(8), saved(2, **now), known) == ([], [])
    assert identity.changes(saved(8), saved(8, **now), known) == ([], ["trainer.mini_batch_size was 2, now 8"])
    odd = identity.changes(saved(6), saved(6, **now), known)
    assert odd == ([], ["trainer.mini_batch_size was '6 sequences', now 6"])
    assert identity.changes(saved(8, **now), saved(8, **now), known) == ([], [])
    assert identity.changes(saved(None), saved(None, **now), known) == ([], [])
