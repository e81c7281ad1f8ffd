"""A run from Python ends like a run of the command: with a summary, a report and a table of the evaluations."""

import json
import os
import signal

import jax
import pytest

import podrl
from podrl.data.pipeline import PromptStream
from podrl.rundir.metrics import read_metrics


def length(prompts, completions, **fields):
    return [-0.01 * len(text) for text in completions]


def digits(prompts, completions, **fields):
    return [float(any(letter.isdigit() for letter in text)) for text in completions]


def cluster_of(root, steps, **sampling):
    """Makes a cluster of the tiny model on one device. Its runs write files to `root`; None writes no files."""
    mesh = podrl.make_mesh("data=1", jax.devices()[:1])
    training = podrl.RLTrainingConfig(max_steps=steps, eval_every_n_steps=0, checkpoint_root_directory=root)
    rollout = podrl.RolloutConfig(max_tokens_to_generate=8, max_prompt_length=64, lanes=16, **sampling)
    roles = {podrl.Role.ACTOR: mesh, podrl.Role.ROLLOUT: mesh}
    settings = podrl.ClusterConfig(role_to_mesh=roles, training_config=training, rollout_config=rollout)
    return podrl.RLCluster(actor=str(podrl.TINY), cluster_config=settings, lora={"rank": 2, "pattern": "q"})


def test_a_list_is_cut_into_steps_as_the_rollout_settings_say(monkeypatch):
    cluster = cluster_of(None, 1, prompts_per_step=3)
    learner = podrl.GRPOLearner(cluster, podrl.GRPOConfig(num_generations=2, beta=0.0), reward_fns=length)

    def listed(items, size, **_):
        raise LookupError(size)

    monkeypatch.setattr(learner, "_listed", listed)
    for given, size in ((None, 3), (2, 2)):
        with pytest.raises(LookupError) as caught:
            learner.train(["Say."] * 6, prompts_per_step=given)
        assert caught.value.args == (size,)


@pytest.mark.parametrize("metric", [lambda prompts, completions: {}, lambda prompts, completions, rewards, hint: {}])
def test_a_metric_function_that_cannot_be_called_is_refused_before_anything_is_sampled(metric, monkeypatch):
    cluster = cluster_of(None, 1)
    monkeypatch.setattr(cluster, "generate", None)
    config = podrl.GRPOConfig(num_generations=2, beta=0.0)
    learner = podrl.GRPOLearner(cluster, config, reward_fns=length, metric_fns=[metric])
    with pytest.raises(ValueError, match=r"metric_fns: <lambda> must take .* fields of the records by name \(.*answer"):
        learner.train([{"prompt": "Tom has 3 apples.", "answer": "3"}])


def test_held_out_prompts_may_lack_the_fields_of_metric_functions(monkeypatch):
    cluster = cluster_of(None, 1)
    monkeypatch.setattr(cluster, "generate", None)
    config = podrl.GRPOConfig(num_generations=2, beta=0.0)
    metric = lambda prompts, completions, rewards, answer, **fields: {}  # noqa: E731
    learner = podrl.GRPOLearner(cluster, config, reward_fns=length, metric_fns=[metric])
    with pytest.raises(TypeError, match="NoneType"):  # the checks passed, and the evaluation began
        learner.train([{"prompt": "Tom has 3 apples.", "answer": "3"}], ["Tom has 4 apples."])


def test_evaluated_prompts_are_not_trained_on(monkeypatch, caplog, capfd):
    cluster = cluster_of(None, 1)
    monkeypatch.setattr(cluster, "generate", None)
    learner = podrl.GRPOLearner(cluster, podrl.GRPOConfig(num_generations=2, beta=0.0), reward_fns=length)
    asked = [f"Tom has {n} apples." for n in range(4)]
    with pytest.raises(TypeError, match="NoneType"):  # the evaluation began
        learner.train([{"prompts": asked}], [{"prompts": asked[:3]}])
    assert "3 of 4 records of train_ds repeat a question of eval_ds" in caplog.text
    with pytest.raises(ValueError, match="Every record of train_ds, 2 in number, repeats a question of eval_ds"):
        learner.train(asked[:2], asked)
    assert "not checked" not in capfd.readouterr().out
    stream = PromptStream.from_list(asked, cluster.tokenizer, prompts_per_step=2, max_prompt_length=64)
    with pytest.raises(TypeError, match="NoneType"):
        learner.train(stream, asked)
    assert "not checked whether the stream of prompts asks questions of eval_ds" in capfd.readouterr().out


@pytest.mark.nightly("podrl/learner/learner.py", "podrl/rundir/run.py")
def test_a_second_call_without_files_is_refused():
    learner = podrl.GRPOLearner(cluster_of(None, 1), podrl.GRPOConfig(num_generations=2, beta=0.0), reward_fns=length)
    assert learner.train(["Tom has 3 apples."], prompts_per_step=1) == 1
    with pytest.raises(
        ValueError, match=r"trained 1 step without files.*set training_config\.checkpoint_root_directory"
    ):
        learner.train(["Tom has 3 apples."], prompts_per_step=1)


@pytest.mark.nightly("podrl/learner/learner.py", "podrl/view/report.py", "podrl/config.py")
@pytest.mark.slow
def test_a_run_from_python_writes_what_the_command_writes(tmp_path, capfd):
    root = tmp_path / "run"
    cluster = cluster_of(str(root), 2)
    assert cluster.model.lora.rank == 2 and cluster.get_rollout_config().max_tokens_to_generate == 8
    learner = podrl.GRPOLearner(
        cluster,
        podrl.GRPOConfig(num_generations=2),
        reward_fns=[length, digits],
        reward_config={"weights": (1.0, 0.5)},
        metric_fns=[lambda prompts, completions, rewards, **fields: {"own/longest": (max(map(len, completions)), max)}],
    )
    asked = [f"Tom has {n} apples." for n in range(4)]
    assert (
        learner.train(
            asked, ["Tom has 5 apples.", "Tom has 6 apples."], prompts_per_step=2, checkpoint={"every": 1, "keep": 1}
        )
        == 2
    )
    said = capfd.readouterr().out
    assert "preceded by" not in said and "2 held-out records" in said and "Evaluation after step 2" not in said
    assert f"Written to {root}:" in "".join(said.splitlines())
    written = json.loads((root / "summary.json").read_text())
    assert written["steps"] == 2 and written["wall_s"] > 0 and "greedy_reward/digits" in written["after"]
    assert "own/longest" in (root / "report.html").read_text()
    step = [record for record in read_metrics(root) if "time/step" in record][-1]
    assert step["reward/mean"] == pytest.approx(step["reward/length"] + 0.5 * step["reward/digits"], abs=1e-6)
    assert [path.name for path in (root / "checkpoints").iterdir()] == ["2"]
    with pytest.raises(ValueError, match=r"checkpoint has no key 'nothing'"):
        learner.train(asked, checkpoint={"nothing": 1})


@pytest.mark.nightly("podrl/learner/learner.py", "podrl/rundir/run.py")
@pytest.mark.slow
def test_a_script_that_is_stopped_says_where_it_goes_on(tmp_path, capfd):
    def stop(prompts, completions, rewards, **fields):
        os.kill(os.getpid(), signal.SIGTERM)
        return {}

    root = tmp_path / "run"
    config = podrl.GRPOConfig(num_generations=2)
    learner = podrl.GRPOLearner(cluster_of(str(root), 2), config, reward_fns=[length], metric_fns=[stop])
    assert learner.train([f"Tom has {n} apples." for n in range(4)], prompts_per_step=2) == 1
    said = "".join(capfd.readouterr().out.splitlines())
    assert f"Stopped after step 1 of 2; the newest checkpoint in {root} is of step 1" in said
    assert not (root / "summary.json").exists()
