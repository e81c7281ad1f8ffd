"""Jobs that pods would refuse once they run are refused before anything is submitted."""

import pytest

from launch import command, gke, xpk

GEMMA, PLACES = (
    "grpo_real.py:gemma3_4b_v5e16",
    ["--config.model.path=gs://b/m", "--config.data.path=gs://b/train.jsonl"],
)


@pytest.mark.parametrize(
    ("config", "extra", "message"),
    [
        (GEMMA, PLACES[1:], "model.path is empty"),
        (GEMMA, PLACES[:1], r"data\.path=train\.jsonl is a path on this machine"),
        ("grpo_gemma.py", ["--config.data.path=mine.jsonl"], r"data\.path=mine\.jsonl is a path on this machine"),
        ("grpo_gemma.py", ["--config.model.path=./model"], r"model\.path=\./model is a path"),
        (
            GEMMA,
            [*PLACES, "--config.roles.trainer.mesh=fsdp=4"],
            r"fsdp=4 and .*data=4,tensor=2 take 12 chips.*have 16",
        ),
    ],
)
def test_a_job_that_cannot_run_is_refused(config, extra, message):
    with pytest.raises(ValueError, match=message):
        command.check_job(config, extra, {"all": 16})


def test_jobs_that_can_run_are_taken():
    command.check_job(GEMMA, PLACES, {"all": 16})
    command.check_job(GEMMA, PLACES, {"trainer": 8, "rollout": 8})
    command.check_job("grpo_gemma.py", [], {"all": 16})  # embedded model and task, meshes that fill the machine
    command.check_job("grpo_gemma.py", ["--config.model.path=/models/m"], {"all": 16})
    command.check_job("grpo_real.py:qwen3_06b_gpu", PLACES, {"all": 1})
    command.check_job("elsewhere.py", ["--config.roles.trainer.mesh=fsdp=-1"], {"all": 16})
    command.check_job(GEMMA, [*PLACES, "--config.roles.eval.hosts=3"], {"trainer": 8, "rollout": 12})  # some evaluate


def test_the_launchers_ask(capsys):
    own = ["--config", GEMMA, "--workdir=gs://b/run", "--image=i"]
    assert gke.main([*own, "--trainer=v5e:4x4", "--rollout=v5e:2x4", "--", *PLACES]) == 1
    assert "roles.trainer.mesh=fsdp=8 take 8 chips, and the machines asked for have 16" in capsys.readouterr().err
    assert xpk.main([*own, "--cluster=c", "--machine=v5e:4x4", "--dry_run", "--", PLACES[1]]) == 1
    assert "model.path is empty" in capsys.readouterr().err
