"""The command line: the places where a config is found, and the errors for misspelt keys."""

import ast
import os
import pathlib
import re
import subprocess
import sys

import pytest
from ml_collections import ConfigDict

from podrl.data.config import SourceConfig
from podrl.data.template import SYSTEM_PROMPT
from podrl.job.config import check_text, complete, quoted, with_prompt_length
from podrl.launch import find_config, take_config
from podrl.rundir.run import check_workdir

ROOT = pathlib.Path(__file__).resolve().parent.parent
_ENV = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}


def test_a_config_is_looked_up_as_given_then_in_configs(tmp_path):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "mine.py").write_text("")
    assert find_config("mine.py:small", tmp_path) == f"{tmp_path}/configs/mine.py:small"
    (tmp_path / "mine.py").write_text("")
    assert find_config("mine.py", tmp_path) == f"{tmp_path}/mine.py"
    assert find_config("grpo_gemma.py", tmp_path) == str(ROOT / "configs" / "grpo_gemma.py")


def test_a_misspelt_config_names_the_nearest(tmp_path):
    with pytest.raises(ValueError, match=r"grpo_gema\.py: no such file.*'grpo_gemma\.py'"):
        find_config("grpo_gema.py", tmp_path)


@pytest.mark.parametrize("text", ["({'path':'a'},{'path':'b'}", "({'path':'a'}]", "({'path':'a)})", "[a,b]"])
def test_a_list_whose_brackets_or_quotes_are_open_is_refused_as_such(text):
    with pytest.raises(ValueError, match=r"data\.sources=.* is no list as Python writes it: close every bracket"):
        check_text("data.sources", text, "grpo")
    assert not check_text("data.sources", "({'path':'a'},)", "grpo")
    with pytest.raises(
        ValueError, match=r"data\.sources=.* is a single item, but the key holds a list: put a comma after it"
    ):
        check_text("data.sources", "({'path':'a'})", "grpo")


def test_both_spellings_of_the_flag_are_taken_out():
    assert take_config(["x", "--config=a.py", "--dry_run"]) == ("a.py", ["x", "--dry_run"])
    assert take_config(["x", "--config", "a.py:v", "--config.seed=1"]) == ("a.py:v", ["x", "--config.seed=1"])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "missing: name a configuration"),
        (["--code=a.py"], "missing: name a configuration"),
        (["--confg=a.py:v", "--seed=1"], r"no flag --confg\. Did you mean --config=a\.py:v\?"),
        (["a.py:v", "--dry_run"], "write --config=a.py:v,"),
        (["--dry_run", "a.py"], "write --config=a.py,"),
    ],
)
def test_a_missing_config_says_what_to_write(args, message):
    with pytest.raises(ValueError, match=message):
        take_config(["x", *args])


def test_keys_without_config_are_understood():
    given = ["x", "--config=a.py", "--dry_run", "trainer.max_steps=10", "--grpo.beta=0.1", "--workdir", "a.b=c"]
    assert take_config(given)[1] == [
        "x",
        "--dry_run",
        "--config.trainer.max_steps=10",
        "--config.grpo.beta=0.1",
        "--workdir=a.b=c",
    ]


@pytest.mark.parametrize(
    ("key", "text"),
    [
        *(("reward.fns", text) for text in ("a.py:f", "a.py:f,number", "pkg.mod:f@d", "dir/b-c.py:f")),
        *(("env.tools", "my_tools.py:calculator"), ("env.mcp", "http://127.0.0.1:8000/mcp"), ("log.to", "wandb")),
    ],
)
def test_items_of_lists_need_no_quotes(key, text):
    assert ast.literal_eval(quoted(key, text, "grpo")) == tuple(text.split(","))


@pytest.mark.parametrize(
    ("key", "text"),
    [
        *(("reward.fns", "('a.py:f',)"), ("env.mcp", "('python server.py',)"), ("env.tools", "()")),
        *(("data.path", "a.jsonl"), ("reward.weights", "1.0,0.5"), ("no.such.key", "a"), ("log.to", "None")),
    ],
)
def test_other_texts_stay_as_they_are(key, text):
    assert quoted(key, text, "grpo") == text


def test_no_default_puts_words_before_a_question(tmp_path):
    own = tmp_path / "own.jsonl"
    own.write_text('{"question": "q", "answer": "1"}\n')

    def decided(fns, **data):
        values = complete({"reward": {"fns": fns}, "data": data, "model": {"path": "tiny"}})
        values["rollout"]["max_prompt_length"] = 64
        return with_prompt_length(ConfigDict(values).to_dict())["data"]

    path = str(own)
    assert decided(("a.py:f",), path=path)["system_prompt"] == ""
    assert decided(("a.py:f", "answer@x"), path=path)["system_prompt"] == SYSTEM_PROMPT
    assert decided(("answer",), path=path, system_prompt="")["system_prompt"] == ""
    assert decided(("answer",), path="problems")["system_prompt"] == "auto"  # later, system_prompt() makes '' of it
    sources = (SourceConfig(path, name="a", reward=("a.py:f",)), SourceConfig(path, name="b"))
    assert [one.system_prompt for one in decided(("answer",), sources=sources)["sources"]] == ["", SYSTEM_PROMPT]


def _launch(tmp_path, *args):
    return subprocess.run(
        [sys.executable, "-m", "podrl.launch", *args],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=tmp_path,
        env=_ENV,
    )


def test_a_dry_run_of_a_pod_checks_its_hosts_and_starts_none(tmp_path):
    """Checks the planned roles with eight devices for three hosts, and with two, of which each host then fakes one."""
    pod = ("--config=grpo_gemma.py", "--dry_run", "--topology=split", "--local_processes=3")
    done = _launch(tmp_path, *pod)
    assert done.returncode == 0 and "Roles of 3 hosts with 1 device each (topology=split)" in done.stdout, done
    done = _launch(tmp_path, *pod, "--config.roles.eval.hosts=2", "--config.fake_devices=8")
    assert done.returncode == 0, done.stderr
    assert "Roles of 3 hosts with 2 devices each (topology=split)" in done.stdout, done.stdout
    for row in (r"trainer +│ +fsdp=2 │ +2 │", r"rollout +│ +data=2 │ +2 │", r"eval .* host 2 │"):
        assert re.search(row, done.stdout), row


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--local_processes=3", "--config.roles.trainer.hosts=0-5"], "hosts [3, 4, 5] are not in this job"),
        (["--local_processes=3", "--config.roles.trainer.mesh=fsdp=8"], "needs 8 devices, hosts 0-1 have 4"),
        (["--local_processes=3", "--config.roles.rollout.mesh=data=4"], "needs 4 devices, and the host has 2."),
        (["--local_processes=1"], "leaves no process that generates: start at least 2"),
        (["--local_processes=3", "--topology=single"], "--topology=single does not"),
        (["--local_processes=3", "--config.topology=split"], "which is a flag of its own: write --topology="),
    ],
)
def test_a_pod_that_cannot_be_is_refused_in_one_sentence(tmp_path, args, message):
    pod = ("--config=grpo_gemma.py", "--dry_run", "--topology=split", "--config.fake_devices=8")
    done = _launch(tmp_path, *pod, *args)
    assert done.returncode == 1 and message in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.parametrize("place", ["file", "file/run"])
def test_a_dry_run_refuses_a_workdir_that_cannot_be_made(tmp_path, place):
    (tmp_path / "file").touch()
    done = _launch(tmp_path, "--config=grpo_gemma.py", "--dry_run", f"--workdir={place}")
    assert done.returncode == 1
    assert f"--workdir={place} cannot be a run directory ({tmp_path}/file is not a directory)" in done.stderr


def test_a_directory_that_cannot_be_written_is_no_workdir(tmp_path):
    with pytest.raises(ValueError, match=r"cannot be a run directory \(/proc cannot be written: .*\)"):
        check_workdir("/proc/a/b")
    check_workdir(tmp_path / "a" / "b")
    assert not list(tmp_path.iterdir())
    check_workdir("gs://bucket/run")


def test_a_dry_run_prints_roles_and_arithmetic_and_writes_nothing(tmp_path):
    done = _launch(tmp_path, "--config=grpo_gemma.py", "--dry_run", "--config.grpo.num_generations=4")
    assert done.returncode == 0, done.stderr
    for text in ("trainer", "fsdp=2", "rollout", "data=2", "16 x 4", "advantage:", "token-mean"):
        assert text in done.stdout, text
    settings, _, _ = done.stdout.partition("Roles (")
    assert "  grpo.num_generations=4\n" in settings and "grpo.beta" not in settings, "defaults are not listed"
    assert "topology=split" not in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_pod_recipe_can_be_read_on_a_laptop(tmp_path):
    done = _launch(tmp_path, "--config=grpo_gemma.py:gemma2_2b_v5e16", "--dry_run")
    assert (
        done.returncode == 1 and "error: model.path is empty: the run itself needs --config.model.path" in done.stderr
    )
    for text in ("fsdp=4,tensor=2", "data=4,tensor=2", "3738", "0.08 KL"):
        assert text in done.stdout, text


def test_an_override_with_none_empties_a_number(tmp_path):
    # This configuration sets train_micro_batch_size (prompts). micro_batch_sequences is accepted only if that key is
    # None.
    emptied = ["--config.trainer.train_micro_batch_size=None", "--config.trainer.micro_batch_sequences=8"]
    last = ["--config.rollout.top_p=None", "--config.rollout.top_p=0.5"]  # the last value counts
    done = _launch(tmp_path, "--config=grpo_gemma.py:gemma2_2b_v5e16", *emptied, *last, "--dry_run", "--all_settings")
    assert '"train_micro_batch_size": null' in done.stdout and '"top_p": 0.5' in done.stdout, done.stderr
    done = _launch(tmp_path, "--config=grpo_gemma.py", "--dry_run", "--config.seed=None")
    assert done.returncode == 1 and "seed=None must be a whole number in" in done.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--config=grpo_gema.py"], "Did you mean 'grpo_gemma.py'"),
        (["--config=grpo_gemma.py:big"], "no variant 'big'"),
        (["--config=grpo_gemma.py", "--config.grpo.num_generatons=4"], "Did you mean 'num_generations'"),
        (["--config=grpo_gemma.py", "--config.max_steps=4"], "Did you mean 'config.trainer.max_steps'?"),
        (["--config=grpo_gemma.py", "--config.roles.trainer.mesh=fsdp=16"], "roles.trainer.mesh"),
        (["--config=grpo_gemma.py", "--config.trainer.mini_batch_size=7"], "mini-batches of 7"),
        (["--config=grpo_gemma.py", "--config.model.path=/nowhere"], "model.path='/nowhere'"),
        (["--config=grpo_gemma.py", "--config.algorithm=grop"], "grop"),
    ],
)
def test_user_errors_fit_one_screen_and_exit_1(tmp_path, args, message):
    done = _launch(tmp_path, *args, "--dry_run")
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) < 15


def test_lines_of_the_log_look_like_those_of_the_report():
    code = """
import logging
from podrl import launch
launch.start_log()
logging.getLogger("podrl.job").warning("%d prompts are left out.", 3)
logging.getLogger("orbax").error("gone")
logging.getLogger("podrl.job").info("unimportant")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == ["Warning: 3 prompts are left out.", "Error of orbax: gone"]
