"""A dry run, and a start before it loads a model, find faults that would end the run a minute later."""

import functools
import json
import os
import pathlib
import re
import shutil

import pytest

import podrl
from podrl.cluster.rl_cluster import RLCluster
from podrl.config import merge
from podrl.data import conversation
from podrl.data import curriculum as curricula
from podrl.data import stream as streams
from podrl.data.mixture import split
from podrl.data.tokenizer import Tokenizer
from podrl.job import evaluation, job, ready
from podrl.job.config import parse, unset
from podrl.rewards.compose import Rewards
from podrl.rundir import identity
from podrl.runtime.watchdog import EXIT_DONE
from podrl.types import BatchError

RECORD = {"question": "2+2?", "answer": "4", "level": "easy"}
MINE = "def scored(prompts, completions, level):\n    return [0.0] * len(completions)\n"


def values(algorithm="grpo", **changes):
    base = merge(unset(algorithm), {"trainer": {"max_steps": 1, "eval_every_n_steps": 0}, "data": {"cache": ""}})
    return merge(merge(base, {"rollout": {"max_prompt_length": 128}}), changes)


def records(tmp_path, *rows):
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows or [RECORD] * 3))
    return {"path": str(tmp_path / "d.jsonl"), "eval_fraction": 0.0, "cache": ""}


def refused(made, message, capsys):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        job.dry_run(made, "runs/x")
    assert "Batch arithmetic" in capsys.readouterr().out  # so the plan was printed before the fault was found


@pytest.fixture
def model(tmp_path):
    """Makes a copy of the checkpoint that comes with podrl."""
    return pathlib.Path(shutil.copytree(podrl.TINY, tmp_path / "model"))


def test_a_dry_run_of_what_is_all_there_passes(tmp_path, model):
    (tmp_path / "mine.py").write_text(MINE)
    data, fns = records(tmp_path), (f"{tmp_path}/mine.py:scored", "number")
    made = values(data=data, reward={"fns": fns}, model={"path": str(model), "reference": "tiny"})
    assert job.dry_run(made, "runs/x") == EXIT_DONE


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("[0.0]", "returned 1 value for 2 completions"),
        ("['good' for text in completions]", r"returned 'good' \(str\), not a number"),
        ("[1 / len(text) for text in completions]", r"raised ZeroDivisionError: .*mine\.py, line 2"),
        ("[text[0]['content'] for text in completions]", r"raised .*string ind.* completions are texts, not lists"),
    ],
)
def test_a_reward_function_that_gives_no_rewards_is_found(body, message, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(f"def scored(prompts, completions, **fields):\n    return {body}\n")
    made = values(data=records(tmp_path), reward={"fns": (f"{tmp_path}/mine.py:scored", "number")})
    tried = r"reward\.fns: reward function scored, tried on .*d\.jsonl line 1 with the completions '' and 'an answer'"
    refused(made, f"{tried}: it {message}", capsys)


@pytest.mark.parametrize(
    ("body", "deadline_s", "said"),
    [
        ("threading.Event().wait()", 0.5, r"it did not return within reward\.deadline_s=0\.5\."),
        ("os._exit(3)", 300.0, "its worker ended"),
    ],
)
def test_a_dry_run_warns_of_a_reward_function_that_does_not_answer(body, deadline_s, said, tmp_path, caplog):
    (tmp_path / "mine.py").write_text(
        f"import os, threading\ndef scored(prompts, completions, **fields):\n    {body}\n"
    )
    fns = (f"{tmp_path}/mine.py:scored", "number")
    made = values(data=records(tmp_path), reward={"fns": fns, "deadline_s": deadline_s})
    assert job.dry_run(made, "runs/x") == EXIT_DONE
    assert re.search(rf"reward function scored, tried on .*: {said}", caplog.text)


@pytest.fixture
def patient(monkeypatch):
    """Gives environments that are tried a long time, because a busy machine may be slow."""
    monkeypatch.setattr(ready, "_TRIAL_S", 300.0)


def environment(tmp_path, body):
    """Returns the settings of a job whose environment's `run` has this body, and writes its file."""
    head = "import pathlib, podrl\nclass Env:\n    async def run(self, task, model):\n"
    (tmp_path / "env.py").write_text(head + "".join(f"        {line}\n" for line in body.split("\n")))
    env = {"environment": f"{tmp_path}/env.py:Env", "deadline_s": 300.0}
    rollout = {"max_prompt_length": 128, "max_response_tokens": 64}
    return values(data=records(tmp_path), env=env, rollout=rollout, reward={"fns": ()}, eval={"problems": 0})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("await model.say()\nreturn 0.0", r"run returned 0\.0 \(float\): it must return a podrl\.Result"),
        ("await model.say()\nreturn podrl.Result('good')", r"run returned reward='good' \(str\), not a number"),
        ("return podrl.Result(1.0, [2.0])", r"run returned metrics=\[2\.0\], not numbers by name"),
        ("turn = model.say()\nreturn len(turn)", r"raised TypeError: .*: write `await` before model\.say.*line 5\)"),
        ("await model.say(task.fields['targt'])", r"raised KeyError: 'targt' \(.*env\.py, line 4\)"),
    ],
)
@pytest.mark.usefixtures("patient")
def test_an_environment_that_no_answer_excuses_is_found(body, message, tmp_path, capsys):
    tried = r"env\.environment='.*env\.py:Env', tried on .*d\.jsonl line 1 with the answer 'an answer': (it )?"
    refused(environment(tmp_path, body), tried + message, capsys)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("turn = await model.say()\nreturn podrl.Result(float(turn.text))", "it raised ValueError: could not convert"),
        ("return podrl.Result(1.0)", r"the episode ended before it asked the model\. Is an `await` missing\?"),
        ("import os\nos.environ['NOT_HERE']", r"it raised KeyError: 'NOT_HERE' \(.*env\.py, line 5\)\. Such an error"),
        ("while True: await model.say('more', role='user')", ""),
        ("while True:\n    try: await model.say()\n    except BaseException: pass", ""),
        ("async def make(): pathlib.Path(task.fields['level']).touch()\nawait model.outside('a', make)\nreturn 1", ""),
    ],
)
@pytest.mark.usefixtures("patient")
def test_a_dry_run_plays_an_episode_and_calls_nothing_outside(body, said, tmp_path, caplog, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert job.dry_run(environment(tmp_path, body), "runs/x") == EXIT_DONE
    assert re.search(said, caplog.text) if said else "tried on" not in caplog.text
    assert not pathlib.Path(RECORD["level"]).exists()


@pytest.mark.usefixtures("patient")
def test_each_of_several_environments_is_tried_after_others_have_failed(tmp_path, capsys, caplog):
    made = environment(tmp_path, "turn = await model.say()\nreturn podrl.Result(float(turn.text))")
    other = f"{tmp_path}/other.py:Env"
    (tmp_path / "other.py").write_text("class Env:\n    async def run(self, task, model):\n        return 1.0\n")
    made["env"] |= {"others": (other,)}
    made["data"] = records(tmp_path, RECORD, RECORD | {"env": other})
    refused(made, r"env\.others: '.*other\.py:Env', tried on .*line 2 .* run returned 1\.0 \(float\)", capsys)
    assert "it raised ValueError: could not convert" in caplog.text


@pytest.mark.parametrize("body", ["import asyncio\nawait asyncio.Event().wait()", "while True: pass"])
def test_a_dry_run_gives_up_an_environment_that_takes_too_long(body, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(ready, "_TRIAL_S", 0.5)
    monkeypatch.chdir(tmp_path)
    assert job.dry_run(environment(tmp_path, body), "runs/x") == EXIT_DONE
    assert re.search(r"it was given up, because its own code took over 0\.5 s", caplog.text)


@pytest.mark.parametrize(
    ("group", "settings", "message"),
    [
        (
            "grpo",
            {"policy_loss_fn": "cispoo"},
            r"policy_loss_fn='cispoo' is not .* of your own\. Did you mean 'cispo'\?",
        ),
        ("grpo", {"advantage_estimator": "rlo"}, r"estimator='rlo' is not an estimator: .* Did you mean 'rloo'\?"),
        ("grpo", {"num_generations": 1}, r"num_generations=1 with .* use at least 2, or grpo\.singleton='raw'"),
        (
            "trainer",
            {"mini_batch_size": 5},
            r"prompts do not split into mini-batches of 5: rollout\.prompts_per_step must",
        ),
        (
            "roles",
            {"trainer": {"mesh": "fdsp=2"}},
            r"roles\.trainer\.mesh='fdsp=2' names axis 'fdsp': give axes and sizes",
        ),
        ("roles", {"colocated": True, "trainer": {"mesh": "fsdp=64"}}, r"fsdp=64 needs 64 devices.*fake_devices=64\."),
        ("env", {"tools": ("calculater",)}, r"env\.tools: 'calculater' is not a .* Did you mean 'calculator'\?"),
        ("reward", {"fns": ("anwser",)}, r"reward\.fns='anwser' is not a built-in reward, .* did you mean 'answer'\?"),
        ("reward", {"weights": (1.0,)}, r"reward\.weights has 1 value for \d functions in reward\.fns: give one each"),
        ("trainer", {"learnng_rate": 1e-4}, r"trainer has no key 'learnng_rate'\. Did you mean 'learning_rate'\?"),
        ("trainer", {"learning_rate": -1.0}, r"^trainer\.learning_rate=-1\.0 must be a number in \[0, 1000\]\.$"),
        ("model", {"path": "nowhere"}, r"model\.path='nowhere' is not a directory: give a Hugging Face directory"),
        ("data", {"path": "gone.jsonl"}, r"data\.path='gone\.jsonl': Data file gone\.jsonl does not exist"),
    ],
)
def test_a_newcomers_mistake_is_answered_with_its_value_what_must_hold_and_the_key(group, settings, message, tmp_path):
    with pytest.raises((ValueError, FileNotFoundError), match=message) as refusal:
        job.dry_run(merge(values(data=records(tmp_path)), {group: settings}), "runs/x")
    assert len(str(refusal.value).splitlines()) == 1


def test_an_argument_of_trls_reward_functions_is_not_a_missing_field(tmp_path, capsys):
    (tmp_path / "mine.py").write_text("def scored(completions, completion_ids):\n    return [0.0] * len(completions)\n")
    made = values(data=records(tmp_path), reward={"fns": (f"{tmp_path}/mine.py:scored", "number")})
    refused(made, r"has no field 'completion_ids' .* podrl passes no token ids", capsys)


def test_what_episodes_give_is_no_missing_field_and_tools_of_servers_may_be_named(tmp_path):
    (tmp_path / "server.py").write_text("")
    servers = {"mcp": (f"python {tmp_path}/server.py",), "max_calls_per_tool": {"search": 2}}
    env = {"environment": "tools", "tools": ("calculator", "snippet_search"), **servers}
    rollout = {"max_prompt_length": 128, "max_response_tokens": 64}
    made = values(data=records(tmp_path), reward={"fns": ("number", "failed_calls")}, env=env, rollout=rollout)
    assert job.dry_run(made, "runs/x") == EXIT_DONE


def test_a_run_directory_of_another_job_is_found(tmp_path, capsys):
    made, run = values(data=records(tmp_path) | {"system_prompt": ""}), tmp_path / "run"
    run.mkdir()
    identity.write(run, identity.plain(parse(made).as_mapping()))
    (run / "metrics.jsonl").write_text('{"step": 1, "time/step": 1.0}\n')
    assert job.dry_run(made, str(run)) == EXIT_DONE
    with pytest.raises(ValueError, match=r"run holds a run of another configuration: seed was 0, now 1\. Give"):
        job.dry_run(made | {"seed": 1}, str(run))
    capsys.readouterr()
    assert job.dry_run(merge(made, {"reward": {"deadline_s": 60.0}}), str(run)) == EXIT_DONE
    said = " ".join(capsys.readouterr().out.split())
    assert "since this run was last started: reward.deadline_s was 30.0, now 60.0 (samples that meet this limit" in said


@pytest.mark.parametrize("key", ["path", "reference"])
def test_missing_weights(model, key, capsys):
    (model / "model.safetensors").unlink()
    refused(values(model={key: str(model)}), rf"model\.{key}=.* has neither model\.safetensors nor", capsys)
    os.mkfifo(model / "model.safetensors")
    refused(values(model={key: str(model)}), r"model\.safetensors is a pipe and must be a regular file", capsys)


def test_weights_of_a_reward_model(model, capsys):
    refused(values(reward={"model": str(model)}), r"/model has no tensor score\.weight", capsys)
    refused(values(reward={"model": str(model / "no")}), r"reward\.model=.* is not a directory", capsys)
    (model / "model.safetensors").write_bytes(b"\0" * 40)
    refused(values(reward={"model": str(model)}), r"reward\.model=.* is not a complete safetensors file", capsys)


@pytest.mark.parametrize("cache", [1024, 20_000])
def test_prompts_longer_than_cache_and_positions_are_refused_once_with_both_limits(cache):
    both = r"1024 \(max_position_embeddings .*lower rollout\.max_prompt_length .* nor rollout\.kv_cache_size"
    with pytest.raises(ValueError, match=f"2000 tokens .* made for {both}"):
        job.dry_run(values(rollout={"max_prompt_length": 2000, "kv_cache_size": cache}), "runs/x")


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"stop_strings": ("a<eos>",)}, "stop string 'a<eos>' holds the special token"),
        ({"eos_tokens": (99_999,)}, r"rollout\.eos_tokens has the id 99999, and the model has \d+ embeddings"),
        ({"eos_tokens": tuple(range(40))}, r"rollout\.eos_tokens has 40 ids: at most"),
        ({"max_prompt_length": 9999, "kv_cache_size": 20_000}, r"A prompt may have 9999 tokens"),
    ],
)
def test_settings_that_do_not_fit_the_model_are_found_before_it_is_loaded(rollout, message):
    with pytest.raises(ValueError, match=message):
        ready.check_fit(parse(values(rollout=rollout)), Tokenizer(podrl.TINY))


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (
            {"rank": 4, "pattern": "expert_in"},
            r"model\.lora\.pattern='expert_in' matches no projection of a gemma2 model",
        ),
        ({"rank": 200}, r"model\.lora\.rank=200 exceeds the model's width of 128"),
    ],
)
def test_adapters_that_do_not_fit_the_model_are_found_before_it_is_loaded(lora, message):
    with pytest.raises(ValueError, match=message):
        ready.check_fit(parse(values(model={"lora": lora})), Tokenizer(podrl.TINY))


@pytest.mark.parametrize(
    ("algorithm", "key", "why"),
    [("orpo", "reference", "compares the policy with no other model"), ("grpo", "critic", "has no critic")],
)
def test_a_model_that_the_algorithm_does_not_read_is_refused(algorithm, key, why):
    with pytest.raises(ValueError, match=rf"model\.{key}='tiny' is not read, because algorithm={algorithm} {why}"):
        parse(values(algorithm, model={key: "tiny"}))


AUXILIARY = {
    "model.reference": ("grpo", lambda path: {"model": {"reference": path}}),
    "model.critic": ("ppo", lambda path: {"model": {"critic": path}}),
    "model.teachers": (
        "opd",
        lambda path: {"model": {"teachers": ({"path": path},)}},
    ),
    "reward.model": ("grpo", lambda path: {"reward": {"model": path}}),
}


@pytest.mark.parametrize("key", AUXILIARY)
def test_a_model_beside_the_policy_that_lacks_ids_is_refused_before_a_model_is_loaded(
    key, model, tmp_path, monkeypatch
):
    monkeypatch.setattr(RLCluster, "__init__", None)  # to load a model is an error here
    # This check would refuse the reward model first, because the model has no head.
    monkeypatch.setattr(ready, "check_head", lambda directory: None)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": 100}))
    algorithm, settings = AUXILIARY[key]
    made = values(algorithm, **merge({"data": records(tmp_path)}, settings(str(model))))
    for start in (job.dry_run, functools.partial(job.run, command="podrl")):
        with pytest.raises(
            ValueError, match=rf"{key}='{model}': The tokenizer has \d+ ids and the model 100 embeddings"
        ):
            start(made, str(tmp_path / "run"))


@pytest.mark.parametrize("key", ["model.reference", "model.critic"])
def test_a_model_that_reads_the_policys_ids_by_another_tokenizer_is_warned_of(key, model, tmp_path, caplog):
    with (model / "tokenizer.json").open("a") as file:
        file.write("\n")
    algorithm, settings = AUXILIARY[key]
    made = values(algorithm, **merge({"data": records(tmp_path)}, settings(str(model))))
    assert job.dry_run(made, "runs/x") == EXIT_DONE
    assert f"is not the tokenizer.json of the model in {model}" in caplog.text
    assert f"Give a {key} with the policy's tokenizer unless this is meant" in caplog.text


def test_a_set_that_cannot_be_scored_is_found_before_the_model_is_loaded(tmp_path):
    pair = {"prompt": "2+2?", "chosen": "4", "rejected": "5", "answer": "4"}
    (tmp_path / "asks.jsonl").write_text('{"prompt": "1+1?"}\n')
    own = {"data": records(tmp_path, *[pair] * 3), "eval": {"sets": ({"name": "a", "path": f"{tmp_path}/asks.jsonl"},)}}
    with pytest.raises(
        ValueError, match=r"eval\.sets: a has records without answers, and algorithm=dpo has no rewards"
    ):
        ready.check_records(parse(values("dpo", **own)), Tokenizer(podrl.TINY))
    with pytest.raises(ValueError, match=r"eval\.sets: a has prompts .* algorithm=reward_model samples nothing"):
        parse(values("reward_model", **own))


@pytest.mark.parametrize(
    ("algorithm", "role", "changes"),
    [
        ("grpo", "reward", lambda path: {"reward": {"model": path}}),
        ("ppo", "critic", lambda path: {"model": {"critic": path}}),
        ("opd", "teacher", lambda path: {"model": {"teachers": ({"path": path},)}}),
    ],
)
def test_a_dense_model_on_a_mesh_of_its_own_that_cuts_experts(model, algorithm, role, changes):
    made = values(algorithm, **changes(str(model)))
    keys = ["reward.model", "model.critic", "model.teachers"]
    ready.check_models(parse(made), keys)
    made["roles"] = made.get("roles", {}) | {"colocated": False, role: {"mesh": "expert=2"}}
    with pytest.raises(ValueError, match=rf"roles\.{role}\.mesh='expert=2' .* a gemma2 model has none"):
        ready.check_models(parse(made), keys)


def test_a_field_that_no_reward_function_can_be_given_is_found_at_the_start(tmp_path, capsys):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = {"question": ["2+2?"] * 3, "answer": ["4"] * 3, "image": [{"bytes": b"\xff\x00"}] * 3}
    parquet.write_table(pyarrow.table(table), tmp_path / "d.parquet")
    data = records(tmp_path) | {"path": str(tmp_path / "d.parquet")}
    refused(values(data=data), r"d\.parquet row 0: the field 'image' is .*, which JSON does not hold", capsys)
    data |= {"sources": ({"path": data.pop("path"), "transforms": ({"rename": {"image": "picture"}},)},)}
    with pytest.raises(ValueError, match=r"d\.parquet row 0: the field 'image' is .*, which JSON does not hold"):
        job.dry_run(values(data=data), "runs/x")


REWARDS = {
    "no such built-in": ("nubmer", "did you mean 'number'"),
    "no file": ("{0}/no.py:scored", "no.py does not exist"),
    "no function": (
        "{0}/mine.py:scorde",
        "has no function or class 'scorde'; it has scored, other, positional, .*, none. Did you mean 'scored'",
    ),
    "no module": ("nowhere_at_all.rewards:f", "nowhere_at_all"),
    "no field": ("{0}/mine.py:other", "has no field 'difficulty' .it has .*level.*, which other of reward.fns"),
    "fields by position": ("{0}/mine.py:positional", "has no field 'difficulty'"),
    "one completion": (
        "{0}/mine.py:single",
        r"'answer' is a field .*: define it as single\(prompts, completions, answer",
    ),
    "one argument": ("{0}/mine.py:alone", r"\(texts, \.\.\.\), .* it takes fewer: define it as alone\(prompts, compl"),
    "no argument": (
        "{0}/mine.py:none",
        r"reward\.fns: .*none has no argument for the prompts .*: define it as none\(pro",
    ),
    "code without tests": ("code", "has no field 'tests' .*, which code of reward.fns takes"),
    "no pattern": ("regex", "has no field 'pattern' .*, which regex of reward.fns takes"),
    "no schema": ("json_schema", "has no field 'schema'"),
}


@pytest.mark.parametrize("case", REWARDS)
def test_rewards_that_cannot_score(tmp_path, case, capsys):
    more = "def other(prompts, completions, difficulty, **fields):\n    return [0.0]\n"
    more += "def positional(asked, said, difficulty):\n    return [0.0]\n"
    more += "def single(text, answer):\n    return 0.0\ndef alone(texts, **fields):\n    return 0.0\n"
    more += "def none(*, answer=None):\n    return 0.0\n"
    (tmp_path / "mine.py").write_text(MINE + more)
    name, message = REWARDS[case]
    refused(values(data=records(tmp_path), reward={"fns": (name.format(tmp_path),)}), message, capsys)


def test_functions_for_data_sets_that_there_are_not(tmp_path, capsys, caplog):
    (tmp_path / "mine.py").write_text(MINE)
    given = records(tmp_path)
    (tmp_path / "e.jsonl").write_text(json.dumps(RECORD) + "\n")
    mixed = given | {"sources": ({"path": given.pop("path")}, {"path": str(tmp_path / "e.jsonl")})}
    own = f"{tmp_path}/mine.py:scored"
    for fns, message in (
        (("number", f"{own}@nope"), r"scored@nope scores the data set 'nope', but the records belong to d, e"),
        ((f"{own}@d",), r"e\.jsonl line 1 has dataset='e', and no function of reward\.fns scores it"),
        (("number", "code@e"), r"e\.jsonl line 1 has no field 'tests' .*, which code@e of reward\.fns takes"),
    ):
        refused(values(data=mixed, reward={"fns": fns}, eval={"problems": 0}), message, capsys)
    made = values(data=mixed, reward={"fns": (f"{own}@d", "number@e")}, eval={"problems": 0})
    assert job.dry_run(made, "runs/x") == EXIT_DONE
    # No reward function scores the records of the set 's'; sets may have records without rewards.
    sets = {"problems": 0, "sets": ({"name": "s", "path": str(tmp_path / "e.jsonl"), "problems": 1},)}
    assert job.dry_run(merge(made, {"eval": sets}), "runs/x") == EXIT_DONE
    rows = [RECORD | {"dataset": "x"}] * (ready._LOOK + 1)
    made = values(data=records(tmp_path, *rows), reward={"fns": ("number", "number@y")}, eval={"problems": 0})
    assert job.dry_run(made, "runs/x") == EXIT_DONE
    assert "number@y scores the data set 'y', but the records belong to x, judging by the first" in caplog.text


def test_one_record_without_tests_is_named(tmp_path, capsys):
    rows = [{"question": "q", "tests": ["assert f()"]}, {"question": "q2", "tests": None}]
    made = values(data=records(tmp_path, *rows), reward={"fns": ("code",)})
    refused(made, r"d\.jsonl line 2 has no field 'tests'", capsys)


def test_a_users_function_is_given_none_where_other_records_have_the_field(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    rows = [RECORD, {"question": "3+3?", "answer": "6"}]
    made = parse(values(data=records(tmp_path, *rows), reward={"fns": (f"{tmp_path}/mine.py:scored",)}))
    with Rewards(made.reward) as rewards:
        ready.check_rewards(made, rewards, Tokenizer(podrl.TINY))


def test_a_field_name_that_no_record_has_is_never_passed_over(tmp_path, capsys, caplog):
    row = {"prompt": "say it", "text": "2+2?", "answer": "mine", "target": "4"}
    mine = "def scored(completions, prompts=None, targt=None, answer=None):\n    return [0.0] * len(completions)\n"
    (tmp_path / "mine.py").write_text(mine)
    data, fns = records(tmp_path, *[row] * 3), {"fns": (f"{tmp_path}/mine.py:scored",)}
    for key, name, meant in (("question_field", "txt", "text"), ("answer_field", "targt", "target")):
        message = (
            rf"data\.{key}='{name}': none of the first 3 records has this field\. The first "
            rf"record has prompt, text, answer, target\. Did you mean '{meant}'\?"
        )
        refused(values(data=data | {key: name}, reward=fns), message, capsys)
    named = data | {"question_field": "text", "answer_field": "target"}
    assert job.dry_run(values(data=named, reward=fns), "runs/x") == EXIT_DONE
    assert "scored gets targt=None: no record has this field" in caplog.text
    assert "answer=None" not in caplog.text and "prompts=None" not in caplog.text
    said = " ".join(capsys.readouterr().out.split())
    assert "The records' own field 'answer' is not given" in said
    assert "field 'prompt' is not given" not in said, "reward functions get the field 'prompt'"


def test_fields_that_only_evaluations_have_are_accepted(tmp_path, caplog):
    held = records(tmp_path, {"problem": "2+2?", "target": "4", "level": 1})["path"]
    held = str(pathlib.Path(held).rename(tmp_path / "held.jsonl"))
    data = records(tmp_path, *[{"prompt": "q", "completion": "a"}] * 3)
    data |= {"eval_path": held, "question_field": "problem", "answer_field": "target"}
    assert job.dry_run(values("sft", data=data), "runs/x") == EXIT_DONE
    mine = "def scored(prompts, completions, level=None):\n    return [0.0] * len(completions)\n"
    (tmp_path / "mine.py").write_text(mine)
    row = {"question": "1+1?", "answer": "2"}
    sets = ({"name": "hard", "path": str(tmp_path / "hard.jsonl"), "problems": 1},)
    for path, more in (("d.jsonl", {"level": 2}), ("hard.jsonl", {})):
        (tmp_path / path).write_text(json.dumps(row | more) + "\n")
    made = values(data={"path": str(tmp_path / "d.jsonl")}, reward={"fns": (f"{tmp_path}/mine.py:scored",)})
    assert job.dry_run(merge(made, {"eval": {"problems": 0, "sets": sets}}), "runs/x") == EXIT_DONE
    assert "level=None" not in caplog.text


FILES = {
    "data": ({"data": {"path": "no.jsonl"}}, r"no\.jsonl does not exist"),
    "eval_path": ({"data": {"eval_path": "no.jsonl"}}, r"no\.jsonl does not exist"),
    "a set": ({"eval": {"sets": ({"name": "s", "path": "no.jsonl"},)}}, r"no\.jsonl does not exist"),
    "an environment": ({"env": {"environment": "no.py:Env"}}, r"env\.environment='no\.py:Env' .*no\.py does not exist"),
    "a class": ({"env": {"environment": "{1}/mine.py:Scord"}}, r"env\.environment='.*:Scord' .*Did you mean 'scored'"),
    "another environment": (
        {"env": {"tools": ("calculator",), "others": ("no.py:Env",)}},
        r"env\.others: 'no\.py:Env' .*no\.py does not exist",
    ),
    "verifiers": ({"env": {"verifiers": "no/python"}}, r"env\.verifiers='no/python' .*there is no command 'no/python'"),
    "a program": ({"env": {"program": "no-program -x"}}, r"env\.program='no-program -x' .*no command 'no-program'"),
    "a program's file": ({"env": {"program": "python no.py"}}, r"env\.program='python no\.py' .*no file '.*no\.py'"),
    "a program's module": (
        {"env": {"program": "python -m podrl.environments.sum_agent"}},
        r"env\.program='.*' cannot be loaded: there is no module 'podrl\.environments\.sum_agent'",
    ),
    "a tool": ({"env": {"tools": ("no.py:tool",)}}, r"env\.tools: 'no\.py:tool' .*no\.py does not exist"),
    "a tool's function": (
        {"env": {"tools": ("{1}/mine.py:scord",)}},
        r"env\.tools: '.*:scord' .*Did you mean 'scored'",
    ),
    "a tool's limit": (
        {"env": {"tools": ("calculator",), "max_calls_per_tool": {"calculater": 1}}},
        r"env\.max_calls_per_tool names calculater, but the tools are calculator",
    ),
    "a server": ({"env": {"mcp": ("no-server -x",)}}, r"env\.mcp: no-server -x .*no command 'no-server'"),
    "a reward": ({"reward": {"fns": ("no.py:f",)}}, r"reward\.fns='no\.py:f': the file .*no\.py does not exist"),
    "a named reward": ({"reward": {"named": ("no.py:f",)}}, r"reward\.named.*='no\.py:f': the file .*no\.py does not"),
    "a loss": ({"grpo": {"policy_loss_fn": "no.py:f"}}, r"grpo\.policy_loss_fn='no\.py:f': the file .*does not exist"),
    "an engine": ({"rollout": {"engine": "no.py:E"}}, r"rollout\.engine='no\.py:E': the file .*no\.py does not exist"),
    "a plan": ({"log": {"plan": "no.json"}}, r"log\.plan='no\.json' is not a plan"),
    "a schema": ({"reward": {"fns": ("json_schema",), "text": {"schema": "no.json"}}}, r"no\.json"),
    "a map": (
        {"data": {"sources": ({"path": "{0}", "transforms": ({"map": "no.py:f"},)},)}},
        r"data\.sources: map='no\.py:f': the file .*no\.py does not exist",
    ),
    "a map's module": (
        {"data": {"sources": ({"path": "{0}", "transforms": ({"map": "nowhere.at_all:f"},)},)}},
        r"data\.sources: map='?nowhere\.at_all:f'?.*ModuleNotFoundError: No module named 'nowhere'",
    ),
    "a map's function": (
        {"data": {"sources": ({"path": "{0}", "transforms": ({"map": "{1}/mine.py:scord"},)},)}},
        r"data\.sources: map=.*mine\.py:scord.*Did you mean 'scored'",
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_files_and_code_that_do_not_exist_are_refused_before_a_model_is_loaded(tmp_path, case, monkeypatch):
    monkeypatch.setattr(RLCluster, "__init__", None)  # to load a model is an error here
    changes, message = FILES[case]
    (tmp_path / "mine.py").write_text(MINE)
    places = {"{0}": records(tmp_path)["path"], "{1}": str(tmp_path)}
    text = json.dumps(changes)
    for name, place in places.items():
        text = text.replace(name, place)
    made = values(**merge({"rollout": {"max_response_tokens": 128}}, json.loads(text)))
    for start in (job.dry_run, functools.partial(job.run, command="podrl")):
        with pytest.raises((ValueError, FileNotFoundError), match=message) as raised:
            start(made, str(tmp_path / "run"))
        assert "Traceback" not in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("algorithm", ["sft", "dpo", "kto"])
def test_answers_of_another_form(tmp_path, algorithm, capsys):
    made = values(algorithm, data=records(tmp_path, {"question": "q"}))
    refused(made, r"d\.jsonl line 1 has question", capsys)


ASKED, SAID = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
UNCALLED = {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {"a": 2}}]}
GIVEN = {
    "sft": ({"messages": [ASKED, SAID]}, {"messages": [ASKED, UNCALLED]}),
    "dpo": (
        {"prompt": "?", "chosen": "4", "rejected": "5"},
        {"prompt": [ASKED], "chosen": [UNCALLED], "rejected": "5"},
    ),
    "kto": (
        {"prompt": "?", "completion": "4", "label": True},
        {"prompt": [ASKED], "completion": [UNCALLED], "label": False},
    ),
}
GIVEN["orpo"] = GIVEN["reward_model"] = GIVEN["dpo"]


@pytest.mark.parametrize("algorithm", GIVEN)
def test_a_given_answer_that_cannot_be_rendered_is_found_at_the_start(tmp_path, algorithm, capsys):
    good, bad = GIVEN[algorithm]
    made = values(algorithm, data=records(tmp_path, *[good] * 3), eval={"problems": 0})
    assert job.dry_run(made, "runs/x") == EXIT_DONE
    long = {"data": records(tmp_path, *[good] * 3), algorithm: {"max_length": 2}}
    refused(
        merge(made, long),
        rf"All of 3 records are longer than 2 tokens \(the .*\): raise {algorithm}\.max_length=2",
        capsys,
    )
    made = values(algorithm, data=records(tmp_path, good, good, bad), eval={"problems": 0})
    fault = r"d\.jsonl line 3: messages\[1\] \(assistant\): the chat template .* does not write its call of 'add'"
    refused(made, fault, capsys)
    with pytest.raises(ValueError, match=fault):
        job.run(made, str(tmp_path / "run"), command="podrl")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("algorithm", GIVEN)
def test_an_evaluation_that_cannot_be_is_found_at_the_start(tmp_path, algorithm, capsys, caplog):
    made = values(algorithm, data=records(tmp_path, *[GIVEN[algorithm][0]] * 3), eval={"problems": 4})
    assert job.dry_run(made, "runs/x") == EXIT_DONE
    of = "pairs" if algorithm == "reward_model" else "records"  # a reward model is evaluated on pairs
    told = rf"line 1 lacks 'answer' \(it has .*\), and no {of} are held out if one of them has no answer"
    assert re.search(told, caplog.text)
    if algorithm == "reward_model":
        return
    (tmp_path / "held.jsonl").write_text(json.dumps({"messages": [ASKED, UNCALLED, ASKED]}) + "\n")
    made = merge(made, {"data": {"eval_path": str(tmp_path / "held.jsonl")}})
    refused(made, r"held\.jsonl line 1: messages\[1\] \(assistant\): the chat template", capsys)


@pytest.mark.parametrize("algorithm", ["dpo", "reward_model"])
def test_sources_with_answers_are_evaluated_and_all_of_the_others_is_trained_on(tmp_path, algorithm, caplog):
    pairs = {name: [GIVEN["dpo"][0] | {"prompt": f"{name} {n}?"} for n in range(40)] for name in ("with", "without")}
    pairs["with"] = [pair | {"answer": "4"} for pair in pairs["with"]]
    for name, rows in pairs.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = tuple({"path": f"{tmp_path}/{name}.jsonl"} for name in pairs)
    data = {"path": "", "sources": sources, "eval_fraction": 0.25}
    made = parse(values(algorithm, data=data, eval={"problems": 99}))
    answered, unanswered = split(made.data, made.kind.form).parts
    (batch,) = evaluation.held_out(made, Tokenizer(podrl.TINY))
    assert all("with " in text for text in batch.text)
    assert len(batch.text) == len(answered.held_out) * (2 if algorithm == "reward_model" else 1) > 0
    assert len(answered.train) + len(answered.held_out) == len(unanswered.train) == 40
    assert re.search(
        r"held out from with only.*trained on, because .*without\.jsonl line 1 lacks 'answer'", caplog.text
    )
    data, _ = evaluation.evaluation_data(made)
    assert data is not None and not evaluation.unmeasured(made, data), (
        "the held-out completions are compared with answers"
    )


def test_an_evaluation_file_with_answers_is_measured_whatever_training_records_have(tmp_path):
    (tmp_path / "held.jsonl").write_text('{"prompt": "1+1?", "answer": "2"}\n')
    data = records(tmp_path, GIVEN["dpo"][0]) | {"eval_path": str(tmp_path / "held.jsonl")}
    made = parse(values("dpo", data=data, eval={"problems": 4}))
    assert evaluation.evaluation_data(made) == (made.data, {}) and not evaluation.unmeasured(made, made.data)


@pytest.mark.parametrize("algorithm", ["grpo", *GIVEN])
def test_a_record_that_cannot_be_rendered_is_named_when_it_is_drawn(tmp_path, algorithm):
    good, bad = GIVEN.get(algorithm, [RECORD] * 2)
    refused_turn = {"role": "tool", "content": "no tools in this template"}
    bad = {"messages": [ASKED, refused_turn, ASKED]} if algorithm == "grpo" else bad
    data = records(tmp_path, *[good] * ready._FEW, bad) | {"shuffle": False}
    sizes = {algorithm: {"batch_size": ready._FEW + 1}} if algorithm in GIVEN else {}
    made = parse(values(algorithm, data=data, rollout={"prompts_per_step": ready._FEW + 1}, **sizes))
    stream = made.kind.stream(made, Tokenizer(podrl.TINY))
    stream.look(ready._FEW)
    # Before a BatchError ends the run, the loop saves the finished steps.
    with pytest.raises(BatchError, match=rf"d\.jsonl line {ready._FEW + 1}: .*(tool|call)"):
        next(stream)


@pytest.mark.parametrize("curriculum", [{}, {"retire_after": 2}])
def test_generated_problems_that_are_all_too_long_are_refused(capsys, monkeypatch, curriculum):
    monkeypatch.setattr(streams, "MOST_IN_A_ROW", 100)
    monkeypatch.setattr(curricula, "MOST_IN_A_ROW", 100)
    made = values("grpo", data={"path": "problems", "curriculum": curriculum}, rollout={"max_prompt_length": 4})
    refused(
        made, r"100 records in a row are longer than 4 tokens \(the .*\): raise rollout\.max_prompt_length=4\.", capsys
    )


@pytest.mark.parametrize("curriculum", [{}, {"retire_after": 2}])
def test_looking_for_a_record_that_fits_moves_no_stream(tmp_path, curriculum):
    long, short = ({"question": text, "answer": "1"} for text in ("one " * 200, "one"))
    data = records(tmp_path, *[long] * 20, short) | {"shuffle": False, "curriculum": curriculum}
    made = parse(values("grpo", data=data, rollout={"prompts_per_step": 1, "max_prompt_length": 64}))
    stream, other = (made.kind.stream(made, Tokenizer(podrl.TINY)) for _ in range(2))
    stream.look(8)
    assert next(stream).text == next(other).text and stream.state() == other.state()


@pytest.mark.parametrize("algorithm", ["grpo", *GIVEN])
def test_a_dry_run_renders_all_of_a_file(tmp_path, algorithm, caplog, capsys):
    good, bad = GIVEN.get(algorithm, [RECORD] * 2)
    bad = (
        {"messages": [ASKED, {"role": "tool", "content": "no tools in this template"}, ASKED]} if bad is RECORD else bad
    )
    with caplog.at_level("INFO"):
        made = values(algorithm, data=records(tmp_path, *[good] * 1001, bad, good), eval={"problems": 0})
        refused(made, r"d\.jsonl line 1002: .*(tool|call)", capsys)
    assert "1000 of 1003 records were checked." in caplog.text


def test_the_start_of_a_run_makes_the_same_checks(tmp_path, model):
    (model / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model\.path=.* has neither model\.safetensors nor"):
        job.run(values(model={"path": str(model)}), str(tmp_path / "run"), command="podrl")
    with pytest.raises(ValueError, match="has no field 'tests'"):
        job.run(values(data=records(tmp_path), reward={"fns": ("code",)}), str(tmp_path / "run"), command="podrl")
    assert not (tmp_path / "run").exists()


DROPPING = (
    "{% for m in messages %}{{ '<start_of_turn>' + m['role'] + '\\n' + 'hello' + '<end_of_turn>\\n' }}{% endfor %}"
)


def test_a_template_that_drops_the_question(tmp_path, model, capsys):
    (model / "chat_template.jinja").write_text(DROPPING)
    made = values(data=records(tmp_path), model={"path": str(model)})
    refused(made, r"The chat template of .*model leaves out the question: '2\+2\?' is not in the prompt", capsys)
    tokenizer = Tokenizer(model)
    for record in (RECORD, {"messages": [{"role": "user", "content": "2+2?"}]}):
        with pytest.raises(ValueError, match=r"leaves out the question|leaves it out"):
            conversation.prompt(record, tokenizer, system="", form="chat")


MALFORMED = (5, "abc", True, [1], [None], ["a.jsonl"], {"path": "x"}, ({},), ({"path": 5},), ({1: 2},), 0.5, b"x")
MALFORMED += (((("path", "a"),),), ({"path": "a", "transforms": 3},), ({"path": "a", "weight": float("nan")},))


@pytest.mark.parametrize("key", ["sources", "sets"])
@pytest.mark.parametrize("value", MALFORMED, ids=str)
def test_malformed_lists_are_refused_by_name(tmp_path, key, value):
    group = "data" if key == "sources" else "eval"
    made = merge(values(), {group: {key: value}})
    for start in (job.dry_run, lambda made, place: job.run(made, place, command="podrl")):
        with pytest.raises(ValueError, match=rf"{group}|{key}|path"):
            start(made, str(tmp_path / "run"))


@pytest.mark.parametrize("staleness", [257, 100_000_000])
def test_staleness_has_a_bound(staleness):
    with pytest.raises(ValueError, match=rf"grpo\.max_staleness={staleness} must be a whole number in \[0, 256\]"):
        parse(values(grpo={"max_staleness": staleness}))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_a_pipe_in_a_models_directory(model, name):
    (model / name).unlink(missing_ok=True)
    os.mkfifo(model / name)
    with pytest.raises(ValueError, match=rf"{name} is a pipe and must be a regular file"):
        job.dry_run(values(model={"path": str(model)}), "runs/x")


def test_a_pipe_as_system_prompt(tmp_path):
    os.mkfifo(tmp_path / "prompt.txt")
    with pytest.raises(ValueError, match=r"prompt\.txt is a pipe"):
        job.dry_run(values(env={"system_prompt_file": str(tmp_path / "prompt.txt")}), "runs/x")


BROKEN = '{"question": '


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"path": "no.jsonl"}}, r"^data\.path='no\.jsonl': Data file no\.jsonl does not exist"),
        ({"data": {"path": "x.jsonl"}}, r"^data\.path='x\.jsonl': x\.jsonl line 1 is not JSON"),
        ({"data": {"path": "x.txt"}}, r"^data\.path='x\.txt': x\.txt ends in"),
        ({"data": {"eval_path": "no.jsonl"}}, r"^data\.eval_path='no\.jsonl': Data file no\.jsonl does not exist"),
        ({"data": {"eval_path": "x.jsonl"}}, r"^data\.eval_path='x\.jsonl': x\.jsonl line 1 is not JSON"),
        ({"data": {"path": "", "sources": ({"path": "x.jsonl"},)}}, r"^data\.sources='x\.jsonl': x\.jsonl line 1"),
        ({"eval": {"sets": ({"name": "a", "path": "x.jsonl"},)}}, r"^eval\.sets='x\.jsonl': x\.jsonl line 1"),
        ({"model": {"path": "no"}}, r"^model\.path='no' is not a directory"),
        (
            {"model": {"path": "empty"}},
            r"^model\.path='empty': empty (holds neither tokenizer\.json|has no config\.json)",
        ),
        (
            {"model": {"path": "model"}, "break": "tokenizer.json"},
            r"^model\.path='model': model/tokenizer\.json is not",
        ),
        (
            {"model": {"path": "model"}, "break": "config.json"},
            r"^model\.path='model': model/config\.json line 1 is not",
        ),
        ({"model": {"path": "model"}, "remove": "config.json"}, r"^model\.path='model': model has no config\.json"),
        ({"model": {"path": "model"}, "remove": "model.safetensors"}, r"^model\.path='model': model has neither model"),
        (
            {"tokenizer": "model", "break": "tokenizer.json"},
            r"^tokenizer='model': model/tokenizer\.json is not a token",
        ),
        ({"tokenizer": "no"}, r"^tokenizer='no': Tokenizer directory no does not exist"),
    ],
)
@pytest.mark.parametrize("longest", [0, 128])
def test_errors_of_files_begin_with_the_key_that_names_the_file(
    changes, message, longest, tmp_path, model, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for name in ("x.jsonl", "x.txt"):
        (tmp_path / name).write_text(BROKEN + "\n")
    changes = dict(changes)
    if broken := changes.pop("break", None):
        (model / broken).write_text(BROKEN)
    if removed := changes.pop("remove", None):
        (model / removed).unlink()
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        job.dry_run(values(**merge(changes, {"rollout": {"max_prompt_length": longest}})), "runs/x")


def test_a_dry_run_says_that_an_update_has_fewer_micro_batches(tmp_path, capsys):
    for algorithm in ("grpo", "sft"):
        data = records(tmp_path, *[{"question": f"{i}+2?", "answer": "4", "completion": "4"} for i in range(9)])
        job.dry_run(values(algorithm, data=data, trainer={"gradient_accumulation_steps": 1000}), "runs/x")
        assert "Warning: trainer.gradient_accumulation_steps=1000 is more than" in capsys.readouterr().out
