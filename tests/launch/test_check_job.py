"""Jobs that would fail when their pods start are refused before anything is submitted."""

import math
import pathlib
import shlex

import pytest

from launch import gke, submission, xpk
from podrl.data.config import EMBEDDED
from podrl.job.config import SCRATCH
from podrl.job.config_file import find_config, load_config
from podrl.mesh.build import parse_mesh
from podrl.storage import hub

GEMMA, PLACES = (
    "grpo_real.py:gemma3_4b_v5e16",
    ["--config.model.path=gs://b/m", "--config.data.path=gs://b/train.jsonl"],
)


def test_launchers_know_the_models_and_tasks_that_come_with_podrl():
    """A model or task on the launchers' list is not refused as a relative path. launch/ does not import podrl, so it
    has its own list."""
    assert sorted(submission._SHIPPED) == sorted([*hub.EMBEDDED, SCRATCH, *EMBEDDED])


@pytest.mark.parametrize(
    ("config", "extra", "message"),
    [
        (GEMMA, PLACES[1:], "model.path is empty"),
        (GEMMA, PLACES[:1], r"data\.path=train\.jsonl is a path on this machine"),
        ("grpo_gemma.py", ["--config.data.path=mine.jsonl"], r"data\.path=mine\.jsonl is a path on this machine"),
        ("grpo_gemma.py", ["--config.model.path=./model"], r"model\.path=\./model is a path"),
        ("grpo_gemma.py", ["--config.tokenizer=./words"], r"tokenizer=\./words is a path"),
        ("grpo_gemma.py", ["--config.model.teachers=({'path': './old'},)"], r"names \./old, which"),
        ("grpo_gemma.py", ["--config.data.path=mine/part.jsonl"], r"data\.path=mine/part\.jsonl is a path"),
        (
            "grpo_gemma.py",
            ["--config.reward.fns=my_rewards.py:short"],
            r"reward\.fns=.* names my_rewards\.py, which is a path",
        ),
        ("grpo_gemma.py", ["--config.reward.fns=('answer', './r/mine.py:f')"], r"names \./r/mine\.py, which"),
        ("grpo_gemma.py", ["--config.env.environment=games/mine.py:Game"], r"names games/mine\.py, which"),
        ("grpo_gemma.py", ["--config.env.servers=({'target': 'python server.py'},)"], r"names server\.py, which"),
        ("grpo_gemma.py", ["--config.data.sources=({'path': 'a.jsonl'},)"], r"names a\.jsonl, which"),
        ("grpo_gemma.py", ["--config.grpo.policy_loss_fn=mine.py:loss"], r"names mine\.py, which"),
        (
            GEMMA,
            [*PLACES, "--config.roles.trainer.mesh=fsdp=4"],
            r"fsdp=4 and .*data=4,tensor=2 take 12 chips.*have 16",
        ),
    ],
)
def test_a_job_that_cannot_run_is_refused(config, extra, message):
    with pytest.raises(ValueError, match=message):
        submission.check_job(config, extra, {"all": 16})


def test_jobs_that_can_run_are_taken():
    submission.check_job(GEMMA, PLACES, {"all": 16})
    submission.check_job(GEMMA, PLACES, {"trainer": 8, "rollout": 8})
    submission.check_job("grpo_gemma.py", [], {"all": 16})  # embedded model and task, meshes that fill the machine
    submission.check_job("grpo_gemma.py", ["--config.model.path=/models/m"], {"all": 16})
    submission.check_job("grpo_real.py:qwen3_06b_gpu", PLACES, {"all": 1})
    submission.check_job("elsewhere.py", ["--config.roles.trainer.mesh=fsdp=-1"], {"all": 16})
    submission.check_job(
        GEMMA, [*PLACES, "--config.roles.eval.hosts=3"], {"trainer": 8, "rollout": 12}
    )  # some hosts evaluate


@pytest.mark.parametrize(
    "setting",
    [
        "model.path=Qwen/Qwen3-8B",
        "model.path=Qwen/Qwen3-0.6B@main",
        "model.teachers=({'path': 'Qwen/Qwen3-8B'},)",
        "data.path=hf:openai/gsm8k:main:train",
        "data.path=tfds:gsm8k/train",
        "reward.fns=/code/my_rewards.py:short",
        "reward.fns=('answer', 'package.module:f')",
        "env.servers=({'target': 'http://tools:80/mcp.json'},)",
        "data.sources=({'path': 'gs://b/a.jsonl'}, {'path': '/data/b.jsonl'})",
    ],
)
def test_names_of_the_hub_and_of_the_image_are_taken(setting):
    submission.check_job("grpo_gemma.py", [f"--config.{setting}"], {})


def test_a_configuration_file_of_this_machine_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def get_config():\n    return {}\n")
    with pytest.raises(ValueError, match=r"--config=mine\.py is a file on this machine"):
        submission.check_job("mine.py", [], {})
    submission.check_job(str(tmp_path / "mine.py"), [], {})  # an absolute path is taken as a path in the image


def test_the_launchers_ask(capsys):
    own = ["--config", GEMMA, "--workdir=gs://b/run", "--image=i"]
    assert gke.main([*own, "--trainer=v5e:4x4", "--rollout=v5e:2x4", "--", *PLACES]) == 1
    assert "roles.trainer.mesh=fsdp=8 take 8 chips, and the machines asked for have 16" in capsys.readouterr().err
    assert xpk.main([*own, "--cluster=c", "--machine=v5e:4x4", "--dry_run", "--", PLACES[1]]) == 1
    assert "model.path is empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "extra", "message"),
    [
        ("grpo_gemma.py", ["--config.trainer.max_stpes=5"], r"no key 'max_stpes'.*'max_steps'"),
        ("grpo_gemma.py", ["trainer.max_steps=many"], r"trainer\.max_steps=many"),
        ("grpo_gemma.py", ["--topolgy=split"], r"--topolgy.*topology"),
        ("grpo_gema.py", [], r"Did you mean 'grpo_gemma\.py'"),
    ],
)
def test_flags_that_podrl_cannot_parse_are_refused(config, extra, message):
    with pytest.raises(ValueError, match=message) as caught:
        submission.check_flags(config, extra)
    assert "\n" not in str(caught.value)


def test_flags_that_cannot_be_checked_here_are_left_to_the_hosts(tmp_path, capsys):
    (tmp_path / "mine.py").write_text("import a_module_of_the_image\n")
    submission.check_flags("mine.py", [], submission.read_code(tmp_path))
    submission.check_flags("/of/the/image.py", [])
    first, second = capsys.readouterr().err.splitlines()
    assert "checked on the hosts only" in first and "a_module_of_the_image" in first
    assert second.endswith("/of/the/image.py is not here.")


def test_a_check_of_flags_that_does_not_end_is_left_to_the_hosts(monkeypatch, capsys):
    monkeypatch.setattr(submission, "_CHECK", "import time; time.sleep(3600)")
    monkeypatch.setattr(submission, "_CHECK_S", 0.5)
    submission.check_flags("grpo_gemma.py", [])
    assert "checked on the hosts only: podrl has not answered within 0.5 s" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("block", "slice_", "machine", "chips"), [(1, "2x2x2", "2x2x2*2", 8), (2, "2x2x1", "2x2x2", 4)]
)
def test_the_commands_of_the_page_write_both_manifests(block, slice_, machine, chips, capsys):
    """The page's command podrl.plan would compile for minutes, so this test only checks that its machines are those of
    the job."""
    page = (pathlib.Path(__file__).parents[2] / "docs" / "clusters.md").read_text()
    commands = page.partition("## Qwen 3 8B on v5p")[2].split("```bash\n")[block].partition("```")[0]
    plan, *launchers = (shlex.split(line) for line in commands.replace("\\\n", " ").splitlines())
    machines, meshes = [f"--trainer=v5p:{slice_}", f"--rollout=v5p:{slice_}"], plan[7:]
    values = load_config(find_config(plan[3].removeprefix("--config="))).to_dict()
    named = dict(word.removeprefix("--config.roles.").split(".mesh=") for word in meshes)
    chosen = [named.get(role, values["roles"][role]["mesh"]) for role in ("trainer", "rollout")]
    assert plan[4:7] == [*machines, "--quick"]
    assert [math.prod(parse_mesh(mesh)) for mesh in chosen] == [chips, chips]
    assert [words[2] for words in launchers] == ["launch.gke", "launch.xpk"]
    assert set(machines) < set(launchers[0]) and f"--machine=v5p:{machine}" in launchers[1]
    for words, launcher in zip(launchers, (gke, xpk), strict=True):
        assert words[len(words) - len(meshes) :] == meshes
        assert launcher.main(words[3:]) == 0
        assert "grpo_qwen.py:qwen3_8b_v5p16" in capsys.readouterr().out


def test_every_launcher_checks_the_flags_behind_the_dashes(capsys):
    typo = ["--", "--config.trainer.max_stpes=5"]
    job = ["--config=grpo_gemma.py", "--workdir=gs://b/r", "--image=i"]
    assert gke.main([*job, "--trainer=v6e:2x4", "--rollout=v6e:2x4", *typo]) == 1
    assert xpk.main([*job, "--cluster=c", "--machine=v6e:4x4", "--dry_run", *typo]) == 1
    assert submission.main(["--", "--config=grpo_gemma.py", typo[1]]) == 3
    assert capsys.readouterr().err.count("has no key 'max_stpes'. Did you mean 'max_steps'?") == 3


@pytest.mark.parametrize("launcher", [gke, xpk])
def test_flags_of_podrl_before_the_dashes_are_answered_with_their_place(launcher, capsys):
    with pytest.raises(SystemExit):
        own = {gke: ["--trainer=v6e:2x4", "--rollout=v6e:2x4"], xpk: ["--cluster=c", "--machine=v6e:4x4"]}[launcher]
        job = ["--config=grpo_gemma.py", "--workdir=gs://b/r", "--image=i", *own]
        launcher.main([*job, "--config.trainer.max_steps=5"])
    assert "podrl's own flags go after --" in capsys.readouterr().err
