"""Every key of the configuration is said to a user of a learner by a name that this user can write."""

import dataclasses
import importlib.util
import inspect
import logging
import re
import subprocess
import sys
from typing import Any

import pytest

import podrl
from podrl.config import merge, require, section
from podrl.job.config import parse, unset
from podrl.python_names import in_python, speaks_python
from podrl.rundir.console import make_console
from podrl.rundir.findings import Examination


def _keys(group, prefix=""):
    for name, value in group.items():
        yield from _keys(value, f"{prefix}{name}.") if isinstance(value, dict) and value else [prefix + name]


def _exists(words):
    """True if `words` are a field of a public class, an argument of a public function, or an argument of a learner."""
    owner, _, rest = words.partition(".")
    if argument := re.fullmatch(r"(\w+)\((\w+)='x'\)", words):
        owner, rest = argument.groups()
        calls = {"train": podrl.GRPOLearner.train}
        return rest in inspect.signature(calls.get(owner) or getattr(podrl, owner)).parameters
    if not rest:
        functions = (podrl.GRPOLearner, podrl.GRPOLearner.train)
        return any(words in inspect.signature(function).parameters for function in functions)
    first = rest.partition(".")[0].partition("[")[0]
    return first in {field.name for field in dataclasses.fields(getattr(podrl, owner))}


def test_every_key_is_said_by_a_name_that_exists_in_python_or_with_what_to_do_instead():
    keys = {key for algorithm in ("grpo", "ppo") for key in _keys(unset(algorithm))}
    assert {"rollout.lanes", "data.long_prompts", "seed"} < keys
    for key in keys:
        said = in_python(f"{'' if '.' in key else '--config.'}{key}='x' must be y.")
        words, _, rest = said.partition(" must be y.")
        if rest:
            assert words == f"{key}='x'" and rest.startswith(f" {key} is a key of podrl.run; with a learner, "), said
            assert rest.endswith(".") and in_python(said) == said
        else:
            name = words if words.endswith(")") else words.removesuffix("='x'")
            assert words != f"{key}='x'" and _exists(name), said


def test_words_that_are_no_keys_and_flags_of_commands_stay():
    for text in (
        "data.jsonl line 3 lacks it: see tests/data.path and roles of turns (podrl.data.config).",
        "`python -m podrl.export --workdir=RUN --out=DIR` writes it; podrl.run(FILE, {'log.to': ()}) logs nothing.",
        "1 tensors are missing: model.norm.weight; model.safetensors, roles.yaml and scratch.txt are files of https://x/"
        "?model.path=3, and an episode calls model.chat.",
        "{'question': 'Set model.path', 'answer': \"It's grpo.beta\"} is a record.",
    ):
        assert in_python(text) == text
    said = "set ClusterConfig.role_to_mesh[Role.ACTOR] and RLTrainingConfig(checkpoint_root_directory=DIR)."
    assert in_python("set roles.trainer.mesh and --workdir=DIR.") == said
    said = "RLTrainingConfig(checkpoint_root_directory=gs://b/r-1/lr=3e-4) is in use, and RLCluster(actor=../a.b): bad."
    assert in_python("--workdir=gs://b/r-1/lr=3e-4 is in use, and model.path=../a.b: bad.") == said
    assert in_python("harder data (data.path), or grpo.beta") == "harder data (train_ds), or GRPOConfig.beta"
    assert in_python("log.trace").startswith("log.trace. log.trace is a key of podrl.run; with a learner, pass train(")
    assert not in_python("log.trace").endswith(".")  # the doctor's finding adds the full stop


def test_settings_name_their_class_to_the_caller_who_made_them_and_their_key_to_podrl():
    with pytest.raises(ValueError, match=r"^RolloutConfig\.temperature=-1 must be a number"):
        podrl.RolloutConfig(temperature=-1)
    with pytest.raises(ValueError, match=r"^Sampling\.temperature=-1 must be a number"):
        podrl.Sampling(temperature=-1)
    with pytest.raises(ValueError, match=r"^GRPOConfig\.num_generations=1 with"):
        dataclasses.replace(podrl.GRPOConfig(), num_generations=1)
    values = merge(unset("grpo"), {"trainer": {"eval_every_n_steps": 0}, "rollout": {"temperature": -1}})
    with pytest.raises(ValueError, match=r"^rollout\.temperature=-1 must be a number"):
        parse(values)


def test_settings_of_a_users_own_class_keep_their_group():
    @section("mine")
    @dataclasses.dataclass(frozen=True)
    class Mine:
        name: str = ""

    with pytest.raises(ValueError, match=r"^Mine\.name=3 must be text\.$"):
        Mine(name=3)  # pyright: ignore[reportArgumentType]


def test_lines_and_logs_say_python_names_while_a_learner_runs_and_keys_afterwards(capsys, caplog):
    log = logging.getLogger("podrl.made_up")

    @speaks_python
    def train():
        make_console().print("Warning: trainer.max_steps=1")
        log.warning("%s do not apply", "reward.limits")
        require(False, "grpo.beta", 1, "2")

    with pytest.raises(ValueError, match=r"^GRPOConfig\.beta=1 must be 2\.$"):
        train()
    make_console().print("Warning: trainer.max_steps=1")
    log.warning("%s do not apply", "reward.limits")
    assert capsys.readouterr().out == "Warning: RLTrainingConfig.max_steps=1\nWarning: trainer.max_steps=1\n"
    assert caplog.messages == ["RewardConfig.limits do not apply", "reward.limits do not apply"]


def test_errors_of_a_users_function_stay_and_no_filter_is_left():
    @speaks_python
    def generate():
        raise KeyError("grpo.beta")

    @speaks_python
    def train():
        logging.getLogger("podrl.newer_than_the_call")
        generate()

    with pytest.raises(KeyError, match=r"^'grpo\.beta'$"):
        train()
    assert not logging.getLogger("podrl.newer_than_the_call").filters


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "podrl.RolloutConfig(lr=3)",
            "RolloutConfig has no field lr: podrl's name for it is RLTrainingConfig.learning_",
        ),
        ("podrl.RLTrainingConfig(report_to='wandb')", "log.to is a key of podrl.run; with a learner"),
        ("podrl.LoraConfig(loss_type='x')", "family use GRPOConfig.loss_agg_mode and GRPOConfig.policy_loss_fn;"),
    ],
)
def test_names_do_not_depend_on_what_a_script_has_imported(code, words):
    done = subprocess.run([sys.executable, "-c", f"import podrl\n{code}"], capture_output=True, text=True, check=False)
    assert words in done.stderr


def test_a_command_of_podrl_is_no_caller_from_outside():
    code = "from podrl.engine.config import Sampling\ndef sample(): Sampling(top_p=3.0)"
    spec = importlib.util.find_spec("podrl.generate")
    command: dict[str, Any] = {"__name__": "__main__", "__spec__": spec}  # what `python -m podrl.generate` sets
    exec(code, command)
    with pytest.raises(ValueError, match=r"^rollout\.top_p=3\.0 must be a number"):
        command["sample"]()


@pytest.mark.parametrize(("data", "key"), [({}, "RolloutConfig.top_k"), ({"data": {}}, "rollout.top_k")])
def test_findings_about_a_learners_run_say_python_names(data, key):
    examination = Examination({"trainer": {}, "rollout": {"top_k": 5}, **data})
    found = examination.see({"step": 1, "time/step": 1.0, "rollout/kept_mass": 0.5})
    assert [finding.key for finding in found if finding.key.startswith(key)], found
