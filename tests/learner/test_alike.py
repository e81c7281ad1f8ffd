"""A pod whose hosts have different files or settings is refused; the error names them, both values and the host."""

import dataclasses
import json
import os
import pathlib
import shutil
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from endpoints import joined
from etils import epath
from ml_collections import ConfigDict
from safetensors.numpy import save_file
from waits import PATIENCE_S

from podrl.config import merge
from podrl.data.cache import Cache
from podrl.job import alike
from podrl.job.config import TINY, Job, complete, parse
from podrl.job.config_file import find_config, load_config
from podrl.runtime.roles import Hosts

HOSTS = Hosts((0,), (1, 2))


def job_of(values: dict[str, Any]) -> Job:
    config = load_config(find_config("grpo_gemma.py")).to_dict()
    values = merge({"rollout": {"max_prompt_length": 64}}, values)
    return parse(ConfigDict(complete(merge(config, values))).to_dict())


@pytest.fixture
def files(tmp_path) -> pathlib.Path:
    """Writes a job's files: data, a model with its tokenizer, rewards that import a module, a tool server's script."""
    (tmp_path / "train.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    (tmp_path / "held.jsonl").write_text('{"question": "2+1", "answer": "3"}\n')
    (tmp_path / "rewards.py").write_text("import words\n\ndef score(prompts, completions):\n    return words.ONES\n")
    (tmp_path / "words.py").write_text("ONES = 1\n")
    (tmp_path / "server.py").write_text("print(1)\n")
    (tmp_path / "prompt.txt").write_text("Use tools.\n")
    (tmp_path / "unused.py").write_text("1\n")
    shutil.copytree(TINY, tmp_path / "model")
    for name in ("model", "judge"):
        (tmp_path / name).mkdir(exist_ok=True)
        save_file({"w": np.zeros(1 << 20, np.float32)}, tmp_path / name / "model.safetensors")
    return tmp_path


def settings(files: pathlib.Path) -> dict[str, Any]:
    return {
        "rollout": {"max_prompt_length": 64, "max_response_tokens": 80},
        "data": {"path": f"{files}/train.jsonl", "eval_path": f"{files}/held.jsonl"},
        "eval": {"sets": ({"name": "own", "path": f"{files}/*.jsonl"},)},
        "model": {"path": f"{files}/model"},
        "reward": {"fns": (f"{files}/rewards.py:score", "json.decoder:loads@own"), "model": f"{files}/judge"},
        "env": {"mcp": (f"python {files}/server.py --port 1",), "system_prompt_file": f"{files}/prompt.txt"},
    }


def _add(text: str) -> Callable[[pathlib.Path], object]:
    return lambda file: file.write_text(file.read_text() + text)


def _flip(file: pathlib.Path) -> None:
    """Changes a model slightly, as training would: every weight gets other bits, and the file keeps its size."""
    save_file({"w": np.full(1 << 20, 1e-6, np.float32)}, file)


_DIFFER: dict[str, tuple[str, Callable[[pathlib.Path], object], str]] = {
    "data": ("train.jsonl", _add('{"question": "1+2", "answer": "3"}\n'), "data.path="),
    "one letter of the data": (
        "train.jsonl", lambda file: file.write_text(file.read_text().replace('"2"', '"3"')), "data.path="),
    "evaluation data": ("held.jsonl", _add('{"question": "1+2", "answer": "3"}\n'), "data.eval_path="),
    "another file of a pattern": ("more.jsonl", lambda file: file.write_text('{"question": "1"}\n'), "eval.sets="),
    "rewards": ("rewards.py", _add("# another\n"), "reward.fns="),
    "a module that rewards import": ("words.py", _add("ONES = 2\n"), "reward.fns="),
    "the script of a server": ("server.py", _add("print(2)\n"), "env.mcp"),
    "a file of a prompt": ("prompt.txt", _add("Now.\n"), "env.system_prompt_file="),
    "the tokenizer": ("model/tokenizer.json", _add(" "), "/tokenizer.json is"),
    "a template": (
        "model/chat_template.jinja", lambda file: file.write_text("{{ messages }}"), "/chat_template.jinja is"),
    "a model's settings": ("model/config.json", _add(" "), "/config.json is"),
    "weights": ("model/model.safetensors", _flip, "model.path="),
    "weights of the reward model": ("judge/model.safetensors", _flip, "reward.model="),
}  # fmt: skip


@pytest.mark.parametrize("what", _DIFFER)
def test_a_file_that_differs_is_named(files, what):
    name, change, said = _DIFFER[what]
    job = job_of(settings(files))
    before = alike.facts(job)
    assert alike.facts(job) == before
    change(files / name)
    after = alike.facts(job)
    differ = [f"{key} is {before.get(key)}" for key in after if after[key] != before.get(key)]
    assert differ and any(said in one for one in differ), differ


def test_a_resumed_run_names_files_that_changed_since_its_last_start(files):
    job, run = job_of(settings(files)), files / "run"
    run.mkdir()
    changed = lambda: alike.changed_since(alike.facts(job), str(run), run)  # noqa: E731
    assert changed() == ""
    _add("# repaired\n")(files / "rewards.py")
    assert changed() == "", "the run trained no step before the file changed"
    (run / "metrics.jsonl").write_text('{"step": 1, "time/step": 1.0}\n')
    assert changed() == ""
    _add("# another\n")(files / "rewards.py")
    said = changed()
    assert "last started: reward.fns=" in said and "rewards.py was " in said and ", now " in said
    assert said.count(", now ") == 1 and "give another --workdir" in said
    (run / alike.NAME).write_text("[")
    assert changed() == ""


def _reward_in(place: pathlib.Path, name: str) -> dict[str, str]:
    return alike.facts(job_of({"reward": {"fns": (f"{place}/{name}:score",)}}))


@pytest.mark.parametrize("name", ["my rewards.py", "a=b.py", "o'brien.py"])
def test_user_code_is_compared_whatever_its_path_holds(tmp_path, name):
    file = tmp_path / name
    file.write_text("def score(prompts, completions):\n    return 1\n")
    before = _reward_in(tmp_path, name)
    _add("# another\n")(file)
    assert {key for key, value in _reward_in(tmp_path, name).items() if before[key] != value} == {f"reward.fns={file}"}


def test_packages_of_any_form_are_compared(tmp_path, monkeypatch):
    """A package may lack __init__.py, hold files that sort before __init__.py, or be reached only by a dotted
    import."""
    for name in ("envs/math/reward.py", "envs/code/reward.py", "pk/__init__.py", "pk/Math/x.py", "lib/sub/mod.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("A = 1\n")
    (tmp_path / "mine.py").write_text("from lib.sub.mod import A\n\n\ndef score(prompts, completions):\n    return A\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    fns = ("envs.math.reward:score@a", "pk.Math.x:score@b", f"{tmp_path}/mine.py:score")
    found = lambda: alike.facts(job_of({"reward": {"fns": fns}}))  # noqa: E731
    before = found()
    for name, key in (("envs/code/reward.py", "=envs"), ("pk/Math/x.py", "=pk"), ("lib/sub/mod.py", "mine.py")):
        _add("B = 2\n")(tmp_path / name)
        after = found()
        assert [named for named, value in after.items() if before[named] != value and named.endswith(key)], name
        before = after


def test_two_parts_of_one_directory_are_both_compared(tmp_path):
    for part in ("train", "more"):
        (tmp_path / f"{part}.jsonl").write_text(f'{{"question": "{part}", "answer": "1"}}\n')
    sources = tuple({"path": str(tmp_path), "split": part, "name": part} for part in ("train", "more"))
    found = lambda: alike.facts(job_of({"data": {"path": "", "sources": sources}}))  # noqa: E731
    before = found()
    for part in ("train", "more"):
        _add('{"question": "x", "answer": "2"}\n')(tmp_path / f"{part}.jsonl")
        after = found()
        assert [key for key in after if before[key] != after[key]] == [f"data.sources={tmp_path} ({part})"]
        before = after


def test_a_file_that_took_anothers_place_has_its_own_checksum(tmp_path):
    """A file may be replaced by a file with the same name, size and modification time."""
    cache, file = Cache(str(tmp_path / "cache")), tmp_path / "train.jsonl"
    found = []
    for text in ("one", "two"):
        (tmp_path / "new").write_text(text)
        (tmp_path / "new").replace(file)
        os.utime(file, (1e9, 1e9))
        found.append(cache.content(epath.Path(file)))
        assert found[-1] == cache.content(epath.Path(file))
    assert found[0] != found[1]


def test_functions_in_settings_are_compared_by_name_and_by_the_file_they_are_in(files):
    """Settings are not compared by repr: the repr of a function holds a memory address, which differs in every
    process."""
    job, place = job_of(settings(files)), str(files / "rewards.py")
    scores: list[dict[str, Any]] = [{}, {}]
    for i in range(2):
        exec(compile("def score(prompts, completions):\n    return [0.0]\n", place, "exec"), scores[i])
    each = [{"reward": {"fns": (scope["score"],)}, "log": {}} for scope in scores]
    with joined(HOSTS) as pods:
        said = _checked(pods[:2], [lambda i=i: alike.check_settings(each[i], pods[i], PATIENCE_S) for i in range(2)])
        assert said == ["", ""]
    job = dataclasses.replace(job, reward=dataclasses.replace(job.reward, fns=(scores[0]["score"],)))
    assert f"reward.fns={place}" in alike.facts(job)


def test_what_the_job_does_not_read_may_differ_and_a_missing_file_is_its_readers_error(files):
    job = job_of(settings(files))
    before = alike.facts(job)
    _add("2\n")(files / "unused.py")
    (files / "model" / "README.md").write_text("other words\n")
    assert alike.facts(job) == before
    (files / "train.jsonl").unlink()
    shutil.rmtree(files / "judge")
    left = alike.facts(job)
    assert left.items() <= {**before, **{key: left[key] for key in left if key.startswith("eval.sets=")}}.items()


def test_weights_are_described_by_reading_a_bounded_part_of_them(tmp_path, monkeypatch):
    file = tmp_path / "large.safetensors"
    with file.open("wb") as content:
        content.truncate(1 << 40)  # a sparse file takes no space, but a terabyte takes hours to read
    first = alike._of_weights(alike.epath.Path(file))
    with file.open("r+b") as content:
        content.seek((1 << 40) - 1)
        content.write(b"1")
    assert first != alike._of_weights(alike.epath.Path(file)) and first.startswith(f"{1 << 40} bytes")


def _checked(pods: list[Any], checks: list[Callable[[], None]]) -> list[str]:
    """Runs one check per host, all at the same time; returns each check's error message, or '' if it passed."""
    said = [""] * len(pods)

    def check(i: int) -> None:
        try:
            checks[i]()
        except ValueError as error:
            said[i] = str(error)

    threads = [threading.Thread(target=check, args=(i,)) for i in range(len(pods))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    return said


def test_a_host_with_other_files_is_refused_with_both_values_and_hosts():
    mine: dict[str, dict[str, str]] = {
        "trainer 0": {"data.path=d": "5 bytes", "jax": "1"},
        "rollout 0": {"data.path=d": "5 bytes", "jax": "1", "reward.model=r": "7 bytes"},
        "rollout 1": {"data.path=d": "6 bytes", "jax": "1"},
    }
    with joined(HOSTS) as pods:
        said = _checked(pods, [lambda pod=pod: alike.check_files(mine[pod.name], pod, PATIENCE_S) for pod in pods])
        assert said[:2] == ["", ""]
        assert said[2].startswith("rollout 1 (host 2, ")
        assert "data.path=d is 6 bytes here, and 5 bytes on trainer 0 (host 0)" in said[2]
        again = {"reward.model=r": "8 bytes"}  # the leader lacks this file: rollout 1 is compared with rollout 0
        said = _checked(pods[2:], [lambda: alike.check_files(again, pods[2], PATIENCE_S)])
        assert "reward.model=r is 8 bytes here, and 7 bytes on rollout 0 (host 1)" in said[0]


@pytest.mark.parametrize(
    ("key", "value", "refused"),
    [
        ("seed", 1, True),
        ("data", {"seed": 1}, True),
        ("rollout", {"temperature": 0.5}, True),
        ("checkpoint", {"every": 3}, True),
        ("checkpoint", {"keep": 9}, False),
        ("log", {"to": ()}, False),
        ("compile_cache", "elsewhere", False),
    ],
)
def test_settings_that_steps_depend_on_are_the_same_on_all_hosts_of_every_topology(key, value, refused):
    config = complete(load_config(find_config("grpo_gemma.py")).to_dict())
    config = json.loads(json.dumps(ConfigDict(config).to_dict(), default=str))
    other = merge(config, {key: value})
    with joined(HOSTS) as pods:
        each = [config, config, other]
        said = _checked(
            pods, [lambda i=i: alike.check_settings(each[i], pods[i], PATIENCE_S) for i in range(len(pods))]
        )
        assert said[:2] == ["", ""]
        assert bool(said[2]) == refused
        if refused:
            assert said[2].startswith("rollout 1 (host 2, ") and f"this host's): {key}" in said[2], said[2]
