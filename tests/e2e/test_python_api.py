"""A user's script trains by the Python API on its own prompts and reward, writes to a chosen directory, and resumes."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from processes import environment, run, same_end, trained_steps

import podrl
from podrl import export
from podrl.rundir import identity
from podrl.rundir.metrics import read_metrics
from podrl.storage.checkpoint import read_state

pytestmark = pytest.mark.e2e


def read_config(workdir: pathlib.Path) -> dict:
    """Reads config.json without its checksum."""
    found = identity.read(workdir, workdir / "checkpoints")
    assert found is not None
    return found


SCRIPT = '''
import sys

import jax

import podrl
from podrl.job.config import TINY


def even(prompts, completions, target, **fields):
    """1 for a completion of about as many words as the prompt asks for."""
    return [1.0 / (1 + abs(len(text.split()) - words)) for text, words in zip(completions, target, strict=True)]


def train(root, steps):
    trainer, rollout = podrl.make_mesh("fsdp=4", jax.devices()[:4]), podrl.make_mesh("data=4", jax.devices()[4:])
    roles = {podrl.Role.ACTOR: trainer, podrl.Role.REFERENCE: trainer, podrl.Role.ROLLOUT: rollout}
    training = podrl.RLTrainingConfig(
        eval_every_n_steps=0, max_steps=steps, learning_rate=1e-4, checkpoint_root_directory=root
    )
    config = podrl.ClusterConfig(
        role_to_mesh=roles,
        training_config=training,
        rollout_config=podrl.RolloutConfig(max_prompt_length=64, max_tokens_to_generate=16, lanes=16),
    )
    cluster = podrl.RLCluster(actor=TINY, cluster_config=config)
    prompts = [{"prompt": f"Say {n} words.", "target": n} for n in range(2, 10)]
    learner = podrl.GRPOLearner(cluster, podrl.GRPOConfig(num_generations=4), reward_fns=even)
    print("reached", learner.train(prompts, prompts_per_step=4))
'''
GUARDED = SCRIPT + '\n\nif __name__ == "__main__":\n    train(sys.argv[1], int(sys.argv[2]))\n'
PPO = (
    GUARDED.replace("fsdp=4", "fsdp=2")
    .replace("jax.devices()[:4]", "jax.devices()[:2]")
    .replace("roles = {", 'roles = {podrl.Role.CRITIC: podrl.make_mesh("fsdp=2", jax.devices()[2:4]), ')
    .replace("learning_rate=1e-4,", "learning_rate=1e-4, critic_learning_rate=1e-3,")
    .replace("podrl.GRPOConfig(num_generations=4)", "podrl.PPOConfig(num_generations=4, critic_warmup=1)")
    .replace("GRPOLearner", "PPOLearner")
)
UNGUARDED = SCRIPT + '\n\ntrain("out", 3)\n'

COMMAND_SCRIPT = """
import pathlib
import sys

import jax

import podrl


def short(prompts, completions, **fields):
    return [-0.01 * len(text) for text in completions]


if __name__ == "__main__":
    small = {
        "trainer": {"max_steps": int(sys.argv[2]), "eval_every_n_steps": 1},
        "checkpoint": {"every": 2},
        "eval": {"problems": 16, "samples": 1},
        "rollout": {"prompts_per_step": 4, "lanes": 16, "max_tokens_to_generate": 16},
        "grpo.num_generations": 4,
        "log.to": (),
        "fake_devices": 8,
        "roles.colocated": False,
    }
    sys.exit(podrl.run("grpo_gemma.py", small, workdir=pathlib.Path(sys.argv[1]), reward_fns=["answer", short]))
"""


def run_script(tmp_path: pathlib.Path, text: str, *args: str) -> subprocess.CompletedProcess:
    (tmp_path / "script.py").write_text(text)
    return subprocess.run(
        [sys.executable, "script.py", *args],
        cwd=tmp_path,
        env=environment(XLA_FLAGS="--xla_force_host_platform_device_count=8"),
        capture_output=True,
        text=True,
        timeout=420,
        check=False,
    )


@pytest.mark.nightly("podrl/learner/learner.py", "podrl/learner/settings.py", "podrl/job/from_python.py")
def test_a_script_trains_writes_and_goes_on_where_it_stopped(tmp_path):
    script = GUARDED.replace("train(prompts, ", "train(prompts, prompts[:3], ")
    done = run_script(tmp_path, script, "out", "3")
    assert done.returncode == 0, done.stderr
    assert "step 3/3" in done.stdout and "reached 3" in done.stdout
    assert "Warning" not in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert trained_steps(tmp_path / "out") == [1, 2, 3]
    samples = [json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines()]
    trained = [sample for sample in samples if "evaluation" not in sample]
    assert trained and all(sample["prompt"].startswith("Say ") and 0 < sample["even"] <= 1 for sample in trained)
    evaluated = [record for record in read_metrics(tmp_path / "out") if "eval/records" in record]
    assert [(record["step"], record["eval/records"]) for record in evaluated] == [(0, 3), (3, 3)]
    assert all(0 < record["eval/greedy_reward/even"] <= 1 for record in evaluated)
    further = run_script(tmp_path, script, "out", "4")
    assert further.returncode == 0, further.stderr
    assert "Resumed after step 3" in further.stdout and "reached 4" in further.stdout
    assert trained_steps(tmp_path / "out") == [1, 2, 3, 4]
    assert read_state(tmp_path / "out" / "checkpoints")[0] == 4
    config = read_config(tmp_path / "out")
    assert config["model"]["path"] == str(podrl.TINY) and config["grpo"]["num_generations"] == 4
    assert config["reward"]["fns"] == ["__main__.even"] and config["rollout"]["prompts_per_step"] == 4
    assert "Step 4" in export.main([f"--workdir={tmp_path / 'out'}", f"--out={tmp_path / 'model'}", "--dtype=float32"])
    exported = podrl.from_pretrained(tmp_path / "model").params
    _, state = read_state(tmp_path / "out" / "checkpoints")
    assert np.array_equal(exported["embed"], state["params"]["embed"])


@pytest.mark.nightly("podrl/learner/learner.py", "podrl/learner/ppo.py")
def test_a_script_trains_a_critic_on_devices_of_its_own_and_goes_on_where_it_stopped(tmp_path):
    done = run_script(tmp_path, PPO, "out", "2")
    assert done.returncode == 0 and "reached 2" in done.stdout, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    further = run_script(tmp_path, PPO, "out", "3")
    assert further.returncode == 0, further.stderr
    assert "Resumed after step 2" in further.stdout and "reached 3" in further.stdout
    records = read_metrics(tmp_path / "out")
    assert trained_steps(tmp_path / "out") == [1, 2, 3]
    assert ["actor/pg_loss" in record for record in records] == [False, True, True]
    assert all(record["critic/vf_loss"] > 0 and record["sampler/abs_diff"] < 1e-4 for record in records)
    step, state = read_state(tmp_path / "out" / "checkpoints")
    assert step == 3 and np.any(state["critic"]["params"]["score"] != 0.0)


def test_a_script_without_a_main_guard_is_told_so(tmp_path):
    done = run_script(tmp_path, UNGUARDED)
    assert done.returncode == 1
    assert "if __name__ == '__main__'" in done.stderr


@pytest.mark.nightly("podrl/__init__.py", "podrl/launch.py")
def test_podrl_run_is_the_command(tmp_path):
    """A script that calls podrl.run ends as the command does, also after a resume.

    Both use the same chat template and held-out records. Configuration, metrics, samples and weights are equal, and the
    directories have files of the same names.
    """
    for steps in ("2", "3"):  # the second start resumes
        done = run_script(tmp_path, COMMAND_SCRIPT, "python", steps)
        assert done.returncode == 0 and done.stderr == "", done.stderr
    assert "Resumed after step 2" in done.stdout and "greedy_answer" in done.stdout
    fns = f"--config.reward.fns=('answer','{tmp_path}/script.py:short')"
    commanded = run(tmp_path / "command", "--config.trainer.max_steps=3", "--config.trainer.eval_every_n_steps=1", fns)
    same_end(tmp_path / "python", commanded.workdir)
    mine, theirs = (read_config(place) for place in (tmp_path / "python", commanded.workdir))
    assert mine == theirs
    names = {path.name for path in commanded.workdir.iterdir()}
    assert {path.name for path in (tmp_path / "python").iterdir()} == names
    before_after = [
        json.loads((place / "summary.json").read_text()) for place in (tmp_path / "python", commanded.workdir)
    ]
    assert before_after[0]["after"] == before_after[1]["after"]


LOSS_SCRIPT = """
import sys

import jax.numpy as jnp

import podrl
from podrl.algorithms.surrogates import token_ratio


def my_clip(logprob_BT, old_logprob_BT, advantage_BT, *, reach=0.3):
    ratio_BT = token_ratio(logprob_BT, old_logprob_BT)
    return jnp.maximum(-advantage_BT * ratio_BT, -advantage_BT * jnp.clip(ratio_BT, 1.0 - reach, 1.0 + reach))


def centred(reward_PG, *, power=1.0):
    return reward_PG - reward_PG.mean(axis=1, keepdims=True)


if __name__ == "__main__":
    small = {"trainer": {"max_steps": 4, "mini_batch_size": MINI}, "eval.problems": 0, "log.to": ()}
    small |= {"fake_devices": 8, "roles.colocated": False}
    small |= {"rollout": {"prompts_per_step": 4, "lanes": 16, "max_tokens_to_generate": 16}, "checkpoint.every": 2}
    small |= {"grpo": {"num_generations": 4, "policy_loss_args": {"reach": 0.2}}}
    sys.exit(podrl.run("grpo_gemma.py", small, workdir=sys.argv[1], loss=my_clip, advantage=centred))
"""


@pytest.mark.nightly("podrl/trainer/custom.py", "podrl/algorithms")
@pytest.mark.optimised  # so that the script's loss compiles to the program of the built-in loss
def test_a_loss_and_an_advantage_of_ones_own_train_as_those_built_in(tmp_path):
    """The script has its own code for the loss `clip` and for GRPO's advantage without a scale.

    Its weights equal bit for bit the weights of a run with the built-in loss and advantage.
    """
    done = run_script(tmp_path, LOSS_SCRIPT.replace("MINI", "2"), "mine")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert "my_clip(reach=0.2), your own" in done.stdout and "centred(power=1), your own" in done.stdout
    config = read_config(tmp_path / "mine")["grpo"]
    assert config["policy_loss_fn"] == f"{tmp_path}/script.py:my_clip" and config["policy_loss_args"] == {"reach": 0.2}
    flags = ("--config.grpo.advantage_scale=none", "--config.trainer.mini_batch_size=2", "--config.eval.problems=0")
    ours = run(tmp_path / "ours", *flags, "--config.trainer.max_steps=4")
    mine, theirs = (read_state(place / "checkpoints")[1]["params"] for place in (tmp_path / "mine", ours.workdir))
    assert np.array_equal(mine["embed"], theirs["embed"])
    named = ("policy_loss_fn", "my_clip"), ("advantage_estimator", "centred")
    flags = [f"--config.grpo.{key}={tmp_path}/script.py:{name}" for key, name in named]
    flags += ["--config.grpo.policy_loss_args.reach=0.2", "--config.trainer.mini_batch_size=2"]
    more = ("--config.eval.problems=0", "--config.trainer.max_steps=4")
    resumed = run(tmp_path / "mine", *flags, *more)  # the command resumes the script's run
    assert "Resumed after step 2" in resumed.stdout
