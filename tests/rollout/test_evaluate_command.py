"""podrl.evaluate scores models on sets of records: numbers by hand, and the commands of docs/evaluation.md."""

import json
import math
import pathlib
import re
import shlex
import types

import numpy as np
import pytest

from podrl import evaluate
from podrl.rewards.code import CodeConfig
from podrl.rewards.compose import RewardConfig, Rewards
from podrl.rewards.sandbox.host import RefusedError, Sandboxes

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "evaluation.md").read_text()


def refused() -> str:
    limits = {"memory_mb": 256, "cpu_s": 1, "wall_s": 60, "threads": 4, "file_mb": 4, "disk_mb": 8}
    try:
        Sandboxes(limits, at_once=1).close()
    except RefusedError as error:
        return str(error)
    return ""


WHY = refused()
isolates = pytest.mark.skipif(bool(WHY), reason=f"this host isolates no programs: {WHY}")


def test_numbers_by_hand():
    right = np.array([[1.0, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    found = evaluate.summary({"right": right, "majority": np.array([[1.0], [0.0], [1.0]])})
    assert {name: one["mean"] for name, one in found.items()} == pytest.approx(
        {"right": 1 / 2, "pass@2": (1 - 1 / 6 + 1) / 3, "pass@4": 2 / 3, "majority@4": 2 / 3}
    )
    # The interval of three records with shares 1/2, 0 and 1 is as wide as Wilson's interval for
    # 1/4 / (0.5**2 / 3 * 2 / 3) = 4.5 samples.
    assert found["right"]["low"] == pytest.approx(
        0.5 - (half := 1.959964 * math.sqrt(1 / 18 + 1.959964**2 / 81) / (1 + 1.959964**2 / 4.5))
    )
    assert found["right"]["high"] == pytest.approx(0.5 + half) and found["right"]["records"] == 3
    assert list(evaluate.summary({"right": right[:1, :1], "majority": right[:1, :1]})) == ["right"]
    seven = evaluate.summary({"right": np.ones((7, 1)), "length": np.full((7, 1), 3.0), "majority": np.ones((7, 1))})
    assert seven["right"] == {"mean": 1.0, "records": 7, "low": pytest.approx(0.6457, abs=1e-4), "high": 1.0}
    assert seven["length"] == {"mean": 3.0, "records": 7}  # equal values do not show how much values vary


def test_a_difference_is_taken_record_by_record():
    one = {"right": np.array([[0.0, 1], [1, 1], [0, 0]]), "majority": np.zeros((3, 1))}
    other = {"right": one["right"] + 0.25, "majority": np.ones((3, 1))}
    # 1.25 is no share, and all differences are equal, so there is no interval.
    assert evaluate.difference(one, other) == {"right": {"mean": 0.25, "records": 3}}
    one, other = ({"right": np.array([[float(x)] for x in text])} for text in ("0000000111", "1111100111"))
    found = evaluate.difference(one, other)["right"]
    # Five of ten records became right. The interval counts two more records, and one of the two as changed:
    # 5/12 +- z sqrt((6/12 - (5/12)**2) / 12).
    assert found["low"] == pytest.approx((5 - 1.959964 * math.sqrt(47 / 12)) / 12)
    assert found["high"] == pytest.approx((5 + 1.959964 * math.sqrt(47 / 12)) / 12) and found["mean"] == 0.5
    same = evaluate.difference(one, one)["right"]
    assert same["mean"] == 0 and same["low"] == -same["high"] and same["high"] == pytest.approx(1.959964 / 12)


def test_the_majority_is_of_answers():
    assert evaluate.majority(["4", "5", "5"], [1, 0, 0]) == 0
    assert evaluate.majority(["4", "5", "4"], [1, 0, 1]) == 1
    assert evaluate.majority(["4", "5"], [1, 0]) == 1


@pytest.mark.parametrize("text", ["x", "a=", "a=x,a=y", "a b=x"])
def test_sets_have_names(text, capsys):
    assert evaluate.main(["--model=m", f"--sets={text}", "--out=o"]) == 1
    assert "must be NAME=FILE" in capsys.readouterr().err


def test_settings_of_rewards_are_those_of_a_job():
    given = ["code.tests=test_list", "code.score=share", "code.cpu_s=2", "code.wall_s=30", "code.packages=('/opt',)"]
    found = evaluate.reward_config("code,mine.py:f", [f"--config.reward.{one}" for one in [*given, "text.extract=7"]])
    assert found.fns == ("code", "mine.py:f") and found.text.extract == "7"
    assert found.code == CodeConfig("test_list", score="share", cpu_s=2, wall_s=30.0, packages=("/opt",))
    assert evaluate.reward_config("", []) == RewardConfig(fns=())


@pytest.mark.parametrize(
    ("fns", "given", "said"),
    [
        ("code", "code.cpus=2", "config.reward.code has no key 'cpus'.*'cpu_s'"),
        ("code", "code.cpu_s=two", "reward.code.cpu_s='two'"),
        ("code", "code.cpu_s=0", "reward.code.cpu_s=0"),
        ("code", "code.cpu_s", "must be --config.reward.KEY=VALUE"),
        ("code", "fns=('code',)", "takes functions from --fns"),
        ("", "code.cpu_s=2", "name them in --fns"),
    ],
)
def test_settings_that_are_none_are_refused_before_anything_is_sampled(fns, given, said, capsys):
    command = ["--model=none", "--sets=a=none.jsonl", "--out=o", f"--fns={fns}", f"--config.reward.{given}"]
    assert evaluate.main(command) == 1
    assert re.search(said, (message := capsys.readouterr().err)), message


def record(answer, *texts, **others):
    completions = [{"text": f"<answer>{text}</answer>"} for text in texts]
    return {"question": "q", "answer": answer, **others, "completions": completions}


GIVEN = ["3+2=5.\n#### 5", "5", 5, 5.0, ["7", "#### 5"], "#### 1,200"]


def test_answers_are_those_of_training():
    """The records' answers have GSM8K's form, or are numbers or lists; accuracies and rewards read the same answer."""
    records = [record(answer, "1,200" if answer == GIVEN[-1] else "5") for answer in GIVEN]
    plain = evaluate.Scoring(None, RewardConfig(), 1.0, 1)
    assert plain(records)["right"].tolist() == [[1.0]] * 6
    config = RewardConfig(fns=("exact_match", "number"))
    with Rewards(config) as rewards:
        found = evaluate.Scoring(rewards, config, 1.0, 1)(records)
    assert found["number"].tolist() == [[1.5]] * 6 and found["exact_match"].tolist() == [[1.0]] * 5 + [[1.0]]


def test_records_that_cannot_be_scored_are_named_before_anything_is_sampled(tmp_path, capsys):
    sets = tmp_path / "set.jsonl"
    sets.write_text('{"question": "q", "answer": "5"}\n{"question": "q", "answer": ""}\n')
    arguments = [f"--model={tmp_path}", f"--sets=one={sets}", f"--out={tmp_path / 'out'}"]
    for more, said in (
        ([], r"set\.jsonl line 2 lacks 'answer' \(it has question, and an empty 'answer'\): give it, name it by"),
        (
            ["--fns=number"],
            r"set\.jsonl line 2 lacks 'answer' .*number \(reward\.fns, .*\) reads an answer: name the field",
        ),
        (["--fns=regex"], r"set\.jsonl line 1 has no field 'pattern'"),
    ):
        assert evaluate.main([*arguments, *more]) == 1
        assert re.search(said, capsys.readouterr().err)
    sets.write_text('{"question": "q", "answer": [["5"]]}\n')
    assert evaluate.main(arguments) == 1 and "line 1: A record: 'answer' is [['5']]" in capsys.readouterr().err


def test_the_rewards_of_a_program_are_scores():
    completions = [{"text": "a", "reward": 1.0}, {"text": "b", "reward": 0.25}]
    records = [{"question": "q", "completions": completions}]
    records.append({"question": "q", "completions": [{"text": "a", "reward": 2.0}, {"text": "b"}]})
    found = evaluate.Scoring(None, RewardConfig(), 0.5, 2, acts=True)(records)
    assert {name: found[name].tolist() for name in ("right", "reward", "lost")} == {
        "right": [[1.0, 0.0], [1.0, 0.0]],
        "reward": [[1.0, 0.25], [2.0, 0.0]],
        "lost": [[0.0, 0.0], [0.0, 1.0]],
    }
    told = [{**record, "answer": "5"} for record in records]
    config = RewardConfig(fns=("exact_match",))
    with Rewards(config) as rewards:
        beside = evaluate.Scoring(rewards, config, 0.5, 2, acts=True)(told)
    assert list(beside) == ["right", "exact_match", "reward", "lost", "majority"] and not beside["right"].any()
    silent = [{"question": "q", "completions": [{"text": "a"}]}]
    with pytest.raises(ValueError, match=r"No completion has a reward, and a record lacks 'answer' \(it has question"):
        evaluate.Scoring(None, RewardConfig(), 0.5, 1, acts=True)(silent)
    away = [{"question": "q", "answer": "5", "completions": [{"text": "", "stop": "deadline"}]}]
    found = evaluate.Scoring(None, RewardConfig(), 0.5, 1, acts=True)(away)
    assert found["lost"].tolist() == [[1.0]] and found["right"].tolist() == [[0.0]]


def test_functions_read_what_episodes_add(tmp_path):
    """Functions get the field 'sample_text' always, the fields 'turns' and 'model_text' only with an environment."""
    said = '<answer><cite id="a-0">1473</cite></answer>'
    whole = f"<tool_output><snippet id=a-0>1473</snippet></tool_output>{said}"
    turns = [{"by": "snippet_search", "text": "", "failed": ""}, {"by": "model", "text": said}]
    records = [{"question": "q", "completions": [{"text": whole, "turns": turns}, {"text": said}]}]
    config = RewardConfig(fns=("citations", "citation_format"))
    path = tmp_path / "set.jsonl"
    path.write_text('{"question": "q"}\n')
    with Rewards(config) as rewards:
        score = evaluate.Scoring(rewards, config, 1.0, 2, acts=True)
        assert len(score.read(str(path))) == 1
        found = score(records)
        assert found["citations"].tolist() == [[1.0, 0.0]] and found["citation_format"].tolist() == [[1.0, 0.8]]
        with pytest.raises(ValueError, match="has no field 'turns'"):
            evaluate.Scoring(rewards, config, 1.0, 2).read(str(path))


def test_a_function_has_no_name_of_a_program_score(tmp_path):
    (tmp_path / "f.py").write_text("def reward(completions, **fields):\n    return [0.0] * len(completions)\n")
    config = RewardConfig(fns=(f"{tmp_path}/f.py:reward",))
    with Rewards(config) as rewards, pytest.raises(ValueError, match="reward is the name of a score"):
        evaluate.Scoring(rewards, config, 1.0, 1, acts=True)


AGENT = """
import json, os, urllib.request
import podrl.agent

def solve(task):
    said = {"model": "policy", "messages": [{"role": "user", "content": task["prompt"]}], "max_tokens": 3}
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(said).encode(), headers)) as answer:
        json.load(answer)
    if task["fields"]["reward"] is None:
        raise RuntimeError("this agent fails")
    return task["fields"]["reward"]

podrl.agent.serve(solve)
"""


def test_a_program_is_evaluated_by_its_own_rewards(tmp_path, monkeypatch, capsys):
    pytest.importorskip("httptools", reason="needs the extra [agents]")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "agent.py").write_text(AGENT)
    rewards = [1.0, 1.0, 0.5, None, 0.0, 1.0]
    records = [{"question": f"{n}?", "reward": reward} for n, reward in enumerate(rewards)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    command = ["--model=tiny_tools", f"--sets=one={tmp_path}/p.jsonl", f"--out={tmp_path}/scores", "--max_new=8"]
    command += ["--max_response=60", f"--program=python {tmp_path}/agent.py"]
    assert evaluate.main(command) == 0, capsys.readouterr().err
    found = json.loads((tmp_path / "scores" / "result.json").read_text())["model"]["one"]["all"]
    means = {name: found[name]["mean"] for name in found}
    assert means == pytest.approx({"right": 3 / 6, "reward": 3.5 / 6, "lost": 1 / 6})
    assert 0 < found["reward"]["low"] < 3.5 / 6 < found["reward"]["high"] < 1
    completions = [json.loads(line) for line in (tmp_path / "scores" / "one.model.jsonl").read_text().splitlines()]
    assert [one["completions"][0].get("reward") for one in completions] == rewards


def test_what_a_tool_said_is_no_answer_and_no_vote():
    told = "hm <tool_output>\n<answer>42</answer></tool_output> bye"
    found = evaluate.Scoring(None, RewardConfig(), 1.0, 2)(
        [{"question": "q", "answer": "42", "completions": [{"text": told}, {"text": "<answer>7</answer>"}]}]
    )
    assert found["right"].tolist() == [[0.0, 0.0]] and found["majority"].tolist() == [[0.0]]


def test_a_completion_without_a_reward_is_named(tmp_path):
    (tmp_path / "f.py").write_text(
        "import os\ndef f(prompts, completions, **fields):\n"
        "    os._exit(3) if 'die' in completions else None\n    return [1.0] * len(completions)\n"
    )
    config = RewardConfig(fns=(f"{tmp_path}/f.py:f",), workers=1)
    asked = {"question": "q", "answer": "1", "completions": [{"text": "x"}, {"text": "die"}]}
    with Rewards(config) as rewards, pytest.raises(ValueError, match="f gave no reward for completion 1 of record 0"):
        evaluate.Scoring(rewards, config, 1.0, 2)([asked])


def test_lines_of_completions_end_where_json_lines_do(tmp_path, monkeypatch):
    """Lines of completions end at '\\n' only: other line ends, such as U+2028, may be part of a text."""
    exact = 12345678901234567.25  # a float would round it
    odd = record(exact, "12345678901234567.25", note="a\u2028b\u2029c\x85d")
    (tmp_path / "p.jsonl").write_text('{"question": "q", "answer": 12345678901234567.25}\n')
    monkeypatch.setattr(evaluate, "model_directory", lambda *_: "model")

    def complete(argv):
        out = next(arg for arg in argv if arg.startswith("--out=")).removeprefix("--out=")
        pathlib.Path(out).write_text(json.dumps(odd, ensure_ascii=False) + "\n", encoding="utf-8")
        return 0

    monkeypatch.setattr(evaluate.generate, "main", complete)
    args = types.SimpleNamespace(out=tmp_path, n=1, devices=1, by="dataset", fns=())
    score = evaluate.Scoring(None, RewardConfig(), 1.0, 1)
    sets = {"one": str(tmp_path / "p.jsonl")}
    records = {"one": score.read(sets["one"])}
    scores, _ = evaluate._scored("model", "model", sets, records, args, [], score)["one"]  # pyright: ignore[reportArgumentType]
    assert scores["right"].tolist() == [[1.0]]  # the completion has all digits of the file's answer


def test_gsm8k_as_it_is_published():
    path = ROOT.parent / "shared" / "data" / "gsm8k_test.jsonl"
    if not path.exists():
        pytest.skip("GSM8K is not on this machine")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    told = [
        {**one, "completions": [{"text": f"<answer>{one['answer'].split('#### ')[1]}</answer>"}]} for one in records
    ]
    assert evaluate.Scoring(None, RewardConfig(), 1.0, 1)(told)["right"].mean() == 1.0


def test_votes_are_read_as_answers_are():
    """Equal numbers in any form are the same vote; the last answer votes, whether its tag is closed or not."""
    five = evaluate.Scoring(None, RewardConfig(), 1.0, 5)
    assert five([record("8", "8", "8.0", "8.", "9", "9")])["majority"].tolist() == [[1.0]]
    texts = [
        "<answer>9</answer> no, <answer>8</answer>",
        "<answer>8",
        "so <answer>$8.00",
        "<answer>9",
        "<answer>9</answer>",
    ]
    found = five([{"question": "q", "answer": "8", "completions": [{"text": text} for text in texts]}])
    assert found["right"].tolist() == [[1, 1, 1, 0, 0]] and found["majority"].tolist() == [[1.0]]


def test_functions_see_all_fields_of_a_record_and_its_question(tmp_path):
    (tmp_path / "f.py").write_text(
        "def f(prompts, completions, index, **fields):\n    return [index[0] + (prompts[0] == 'hi')]\n"
    )
    config = RewardConfig(fns=(f"{tmp_path}/f.py:f",))
    asked = {"index": 7, "messages": [{"role": "user", "content": "hi"}], "completions": [{"text": "x"}]}
    with Rewards(config) as rewards:
        assert evaluate.Scoring(rewards, config, 1.0, 1)([asked])["f"].tolist() == [[8.0]]


def test_a_run_is_scored_with_its_stop_strings_and_its_fields(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    rollout, data = {"stop_strings": ["</answer>", "END"]}, {"question_field": "ask", "answer_field": "gold"}
    (tmp_path / "config.json").write_text(json.dumps({"rollout": rollout, "data": data}))
    assert evaluate.stop_strings([str(tmp_path), "elsewhere"]) == ["</answer>", "END"]
    assert evaluate.fields_of_run(str(tmp_path)) == data
    assert evaluate.fields_of_run("elsewhere") == {"question_field": "question", "answer_field": "answer"}


def test_records_may_ask_and_answer_in_fields_of_other_names(tmp_path, monkeypatch, capsys):
    """podrl.generate gets the names of the fields. Reward functions get the answer under its usual name too."""
    (tmp_path / "f.py").write_text(
        "def f(prompts, completions, answer, ask, gold, **fields):\n"
        "    return [(prompts[0], answer[0], ask[0], gold[0]) == ('How many?', '5', 'How many?', 5)]\n"
    )
    (tmp_path / "set.jsonl").write_text('{"ask": "How many?", "gold": 5}\n')
    given = []

    def complete(argv):
        given.extend(argv)
        out = next(arg for arg in argv if arg.startswith("--out=")).removeprefix("--out=")
        one = {"ask": "How many?", "gold": 5, "completions": [{"text": "x"}]}
        pathlib.Path(out).write_text(json.dumps(one) + "\n")
        return 0

    monkeypatch.setattr(evaluate.generate, "main", complete)
    arguments = [f"--model={tmp_path}", f"--sets=one={tmp_path}/set.jsonl", f"--out={tmp_path}/out"]
    arguments += [f"--fns={tmp_path}/f.py:f"]
    assert evaluate.main([*arguments, "--question_field=ask", "--answer_field=gold"]) == 0, capsys.readouterr().err
    assert "--question_field=ask" in given
    (found,) = json.loads((tmp_path / "out" / "result.json").read_text())["model"]["one"].values()
    assert found["f"]["mean"] == found["right"]["mean"] == 1.0
    assert evaluate.main(arguments) == 1 and "name it by --question_field" in capsys.readouterr().err


@isolates
def test_programs_are_tested_as_in_a_job():
    """The first program passes half of its tests. The second never ends: the configured limit stops it, and it loses
    only its own score."""
    given = ["--config.reward.code.tests=test_list", "--config.reward.code.score=share", "--config.reward.code.cpu_s=1"]
    config = evaluate.reward_config("code", given)
    texts = ["def add(a, b):\n    return 3", "while True: pass"]
    record = {"question": "?", "test_list": ["assert add(1, 2) == 3", "assert add(1, 1) == 2"]}
    records = [{**record, "completions": [{"text": text} for text in texts]}]
    with Rewards(config) as rewards:
        scores = evaluate.Scoring(rewards, config, right=0.5, n=2)(records)
    assert scores["code"].tolist() == [[0.5, 0.0]] and scores["right"].tolist() == [[1.0, 0.0]]


@pytest.mark.slow
def test_the_commands_of_the_page(tmp_path, monkeypatch, capsys):
    for name in ("sums", "words"):
        records = [{"question": f"{name}: {n} + 3?", "answer": str(n + 3), "dataset": "ab"[n % 2]} for n in range(4)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "podrl").symlink_to(ROOT / "podrl")
    monkeypatch.chdir(tmp_path)
    lines = "".join(re.findall(r"^```bash\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)).splitlines()
    commands = [shlex.split(line)[3:] for line in lines if line.startswith("python -m podrl.evaluate ")]
    assert len(commands) == 3
    tests = [{"question": "Write add.", "tests": ["assert add(1, 2) == 3"]}] * 2
    (tmp_path / "code.jsonl").write_text("".join(json.dumps(record) + "\n" for record in tests))
    for command in (one for one in commands if not WHY or "--fns=code" not in one):
        assert evaluate.main(command) == 0, capsys.readouterr().err
        result = json.loads((tmp_path / "scores" / "result.json").read_text())
        if "code" in result["model"]:
            assert result["model"]["code"]["all"]["code"] == {
                "mean": 0.0,
                "records": 2,
                "low": 0.0,
                "high": pytest.approx(0.6576, abs=1e-4),
            }
        elif "difference" not in result:
            assert list(result["model"]) == ["sums", "words"]
            assert list(result["model"]["sums"]["by"]) == ["a", "b"]
            assert result["model"]["sums"]["all"]["pass@2"]["records"] == 4
        else:
            assert set(result["difference"]["sums"]) == {"right", "number", "exact_format"}
            completed = (tmp_path / "scores" / "sums.compare.jsonl").read_text().splitlines()
            assert [len(json.loads(line)["completions"]) for line in completed] == [2] * 4
    assert "difference" in capsys.readouterr().out
