"""Reward functions in their workers: how they are found, what they may return, and messages when they fail."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from waits import is_running, until

import podrl
from podrl.rewards import reference
from podrl.rewards.code import CodeConfig
from podrl.rewards.compose import RewardConfig, RewardError, Rewards
from podrl.rewards.judge import JudgeConfig
from podrl.rewards.text import TextConfig
from podrl.runtime.service import ServiceError

FILE = pathlib.Path(__file__).parent / "graders.py"


def named(*names, **config):
    return RewardConfig(fns=tuple(f"{FILE}:{name}" for name in names), **{"deadline_s": 20.0, "workers": 1, **config})


def score(config, *completions, **fields):
    with Rewards(config) as rewards:
        return rewards.score([f"prompt {i}" for i in range(len(completions))], completions, fields)


def failure(config, *completions, **fields):
    with pytest.raises(RewardError) as caught:
        score(config, *completions, **fields)
    return str(caught.value)


def children():
    """Lists the child processes of this process that run the worker."""
    found = []
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            command = (stat.parent / "cmdline").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == os.getpid() and "podrl.rewards.worker" in command:
            found.append(int(stat.parent.name))
    return found


def test_a_reward_function_may_be_a_coroutine(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import asyncio\n"
        "async def one(text):\n    await asyncio.sleep(0)\n    return float(len(text))\n"
        "async def lengths(prompts, completions, **fields):\n"
        "    return await asyncio.gather(*map(one, completions))\n"
        "loops = []\n"
        "async def once(prompts, completions, **fields):\n"
        "    loops.append(asyncio.get_running_loop())\n"
        "    return [float(all(one is loops[0] and not one.is_closed() for one in loops))] * len(completions)\n"
        "async def fails(prompts, completions, **fields):\n    raise KeyError('gone')\n"
    )
    assert score(RewardConfig(fns=(f"{tmp_path}/mine.py:lengths",)), "a", "bcd").tolist() == [[1.0, 3.0]]
    # All calls must run on one event loop, because a client of a function may be bound to its loop.
    with Rewards(RewardConfig(fns=(f"{tmp_path}/mine.py:once",), workers=1)) as rewards:
        assert [rewards.score(["?"], ["a"], {}).tolist() for _ in range(3)] == 3 * [[[1.0]]]
    assert "KeyError: 'gone'" in failure(RewardConfig(fns=(f"{tmp_path}/mine.py:fails",)), "a")


def test_the_reference_rewards_are_the_default():
    good = "<reasoning>2+2=4.</reasoning><answer>4</answer>"
    with Rewards(RewardConfig(workers=2)) as rewards:
        reward_FB = rewards.score(["?"] * 3, [good, "4", "<answer>4"], {"answer": ["4"] * 3, "question": ["?"] * 3})
        assert rewards.names == ("exact_format", "approximate_format", "answer", "number")
        assert reward_FB.tolist() == [[3, 0, 0], [2, -2, -1], [3, 0, 0], [1.5, 0, 1.5]]
        assert rewards.combine(reward_FB).tolist() == [9.5, -2, 0.5]


def test_weights_and_a_half_stays_a_half():
    config = named("length", "Grader.half", weights=(2.0, -1.0))
    with Rewards(config) as rewards:
        reward_FB = rewards.score(["", ""], ["abc", ""], {})
        assert rewards.names == ("length", "half")
        assert reward_FB.tolist() == [[0.3, 0.0], [0.5, 0.5]]
        assert rewards.combine(reward_FB) == pytest.approx([0.1, -0.5])


def test_every_way_to_name_a_function():
    def local(prompts, completions, **fields):
        return [7.0] * len(completions)

    fns = ("number", "podrl.rewards.reference:number", reference.exact_format, local, f"{FILE}:strict_signature")
    with Rewards(RewardConfig(fns=fns, workers=1)) as rewards:
        reward_FB = rewards.score(["?"], ["4"], {"answer": ["4"], "question": ["?"]})
        assert rewards.names == ("number", "number_2", "exact_format", "local", "strict_signature")
        assert reward_FB[:, 0].tolist() == [0, 0, 0, 7, 1]


def test_only_what_no_worker_can_find_runs_here_and_that_is_said(caplog):
    with Rewards(RewardConfig(fns=(lambda prompts, completions, **f: [float(os.getpid())],), workers=1)) as rewards:
        assert rewards.score([""], [""], {})[0, 0] == os.getpid()
        assert rewards.names == ("lambda",)
    assert "lambda cannot be imported by file and name" in caplog.text
    caplog.clear()
    with Rewards(RewardConfig(fns=(process_of_module_function,), workers=1)) as rewards:
        assert rewards.score([""], [""], {})[0, 0] not in (0, os.getpid())
    assert not caplog.text


def process_of_module_function(prompts, completions, **fields):
    return [float(os.getpid())]


def test_workers_never_import_jax_and_know_what_they_are():
    reward_FB = score(named("imports"), "a", "b", "c")
    assert reward_FB[0, :2].tolist() == [0.0, 1.0] and reward_FB[0, 2] != os.getpid()


def test_what_a_function_prints_does_not_reach_the_pipe(capfd):
    assert score(named("chatty"), "a").tolist() == [[1.0]]
    out, err = capfd.readouterr()
    assert out == "" and "to standard output" in err


def test_fields_of_numpy_reach_the_worker_and_others_are_refused():
    assert score(named("strict_signature"), "4", answer=np.array(["4"])).tolist() == [[1.0]]
    assert "fields answer cannot be sent" in failure(named("length"), "4", answer=[object()])


def test_arguments_by_name_or_by_position():
    assert score(named("other_names"), "ab").tolist() == [[2.0]]
    assert score(named("completions_only"), "abc", answer=["4"]).tolist() == [[3.0]]
    positional = lambda question, answer, /, **fields: [float(len(answer[0]))]  # noqa: E731
    assert score(RewardConfig(fns=(positional,)), "ab", answer=["four"]).tolist() == [[2.0]], (
        "positional-only arguments are not matched with fields by name"
    )


def test_no_completions():
    assert score(named("length", "chatty")).shape == (2, 0)


def test_lengths_must_match():
    with Rewards(named("length")) as rewards, pytest.raises(ValueError, match="answer has 1 value for 2 completions"):
        rewards.score(["", ""], ["", ""], {"answer": ["4"]})


def test_a_function_that_fails_for_several_samples_only_is_named_with_the_first():
    text = failure(named("one_for_all"), "a", "b")
    assert "one_for_all failed for 2 samples at once, and for none of them alone; the first is sample 0 of 2 (" in text
    assert "'a'): it returned 1 value for 2 completions: [1.0]" in text


def test_a_function_that_raises_is_named_with_the_sample():
    text = failure(named("raises"), "abc", "de", "", "f")
    assert "raises failed for sample 2 of 4 (prompt 'prompt 2', completion '')" in text
    assert "ZeroDivisionError" in text and "graders.py" in text and "10.0 / len(c)" in text


def test_a_value_that_is_not_finite_is_named_with_the_sample():
    for value in ("nan", "inf"):
        text = failure(named("not_finite"), "1", value)
        assert f"not_finite returned {value}, not a finite number, for sample 1 of 2 (prompt 'prompt 1'" in text


def test_a_value_that_is_no_number():
    text = failure(named("not_numbers"), "a", "b", "c")
    assert "not_numbers returned '0.5' (str), not a number, for sample 1 of 3" in text


def test_a_wrong_number_of_values_names_the_sample_that_lacks_one():
    text = failure(named("too_few"), "a", "drop", "b")
    assert "too_few failed for sample 1 of 3" in text and "returned 2 values for 3 completions: [1.0, 1.0]" in text


def test_no_list_at_all():
    assert "returned None (NoneType), not a list of numbers" in failure(named("nothing"), "a")


@pytest.mark.parametrize("calls", ["group", "sample"])
@pytest.mark.parametrize("name", ["sleeps", "holds_the_interpreter"])
def test_a_sample_that_hangs_is_ended_and_counted(name, calls):
    """The sample that hangs gets the reward of an empty completion, and the other samples of its call get their own
    rewards."""
    text = "sleep" if name == "sleeps" else "a" * 40
    with Rewards(named(name, deadline_s=0.6, calls=calls)) as rewards:
        before = children()
        assert rewards.score(["p", "q", "r"], ["x", text, "aab"], {}).tolist() == [[0.0, 0.0, float(name != "sleeps")]]
        assert (rewards.take_late(), rewards.take_late()) == (1, 0)
        until(lambda: not any(map(is_running, before)))
    assert not children()


def test_a_function_that_is_slow_for_many_samples_has_the_time_of_each():
    assert score(named("slow", deadline_s=1.0), *["x"] * 15).tolist() == [[0.0] * 15]


def test_a_function_that_hangs_for_every_sample_is_an_error():
    text = failure(named("always_sleeps", deadline_s=0.3), "x", "y")
    assert "nor for an empty completion" in text and "reward.deadline_s" in text


def test_a_hang_in_this_process_is_named():
    def stuck(prompts, completions, **fields):
        while "stop" in completions:
            time.sleep(0.01)
            if time.monotonic() > end:
                break
        return [0.0] * len(completions)

    end = time.monotonic() + 2
    text = failure(RewardConfig(fns=(stuck,), deadline_s=0.3), "x", "stop")
    assert "stuck did not return within 0.3 s" in text and "sample 1 of 2" in text


@pytest.mark.parametrize("calls", ["group", "sample"])
def test_a_sample_on_which_the_worker_dies_leaves_the_loss(calls):
    with Rewards(named("exits", calls=calls)) as rewards:
        reward_FB = rewards.score(["p", "q"], ["x", "exit"], {})
        assert np.isnan(reward_FB).tolist() == [[False, True]] == np.isnan(rewards.combine(reward_FB)[None]).tolist()
        assert rewards.score(["p"], ["x"], {}).tolist() == [[0.0]]
    assert "SystemExit: 4" in failure(named("leaves_quietly"), "x")


def test_a_worker_that_is_killed_is_replaced_and_the_sample_scored(tmp_path):
    with Rewards(named("killed_once")) as rewards:
        assert rewards.score(["p"] * 2, ["x", "yy"], {"file": [f"{tmp_path}/killed"] * 2}).tolist() == [[1.0, 2.0]]
        os.kill(children()[0], signal.SIGKILL)  # killed while it is idle
        assert rewards.score(["p"], ["x"], {"file": [f"{tmp_path}/killed"]}).tolist() == [[1.0]]


def test_a_host_that_kills_every_worker_is_at_fault():
    with pytest.raises(ServiceError, match=r"killed from outside \(its process ended with SIGKILL"):
        score(named("always_killed"), "x", "y")


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        ("exact_fromat", r"did you mean 'exact_format'\?"),
        ("reward", r"not a built-in reward, 'file\.py:function'"),
        ("nowhere.py:f", r"the file .*nowhere\.py does not exist"),
        (
            f"{FILE}:lenght",
            r"graders\.py has no function or class 'lenght'; it has .*length.*\. Did you mean 'length'\?",
        ),
        (f"{FILE}:not_callable", r"'not_callable' is int 3, not a function"),
        (f"{FILE}:not_callable.score", r"graders\.py has no function or class 'not_callable\.score'; it has none\."),
        ("no.such.module:f", r"No module named 'no'"),
        (3, r"reward\.fns holds 3 \(int\)"),
    ],
)
def test_functions_that_are_not_there(fn, message):
    with pytest.raises(ValueError, match=message):
        Rewards(RewardConfig(fns=(fn,), workers=1))
    assert not children()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"fns": ()}, r"reward\.fns is empty"),
        ({"weights": (1.0,)}, r"reward\.weights has 1 value for 4 functions"),
        (
            {"weights": (1.0, 1.0, 1.0, float("nan"))},
            r"^RewardConfig\.weights\[3\]=nan must be a number in \[-1e9, 1e9\]",
        ),
        ({"deadline_s": 0.0}, r"^RewardConfig\.deadline_s=0\.0"),
        ({"workers": 0}, r"^RewardConfig\.workers=0"),
    ],
)
def test_bad_configurations(values, message):
    with pytest.raises(ValueError, match=message):
        Rewards(RewardConfig(**values))


def test_a_file_that_does_not_run_is_named_with_its_line(tmp_path):
    (tmp_path / "mine.py").write_text("import math\nx = 1 / 0\n\ndef f(prompts, completions): return []\n")
    with pytest.raises(
        ValueError, match=r"reward\.fns: '.*mine\.py:f' cannot be loaded: ZeroDivisionError: .* \(.*mine\.py, line 2\)$"
    ):
        Rewards(RewardConfig(fns=(f"{tmp_path}/mine.py:f",), workers=1))


def test_close_leaves_no_process_of_any_kind():
    with Rewards(named("starts_a_child", workers=2, calls="batch")) as rewards:
        child = int(rewards.score([""], [""], {})[0, 0])
        assert len(children()) == 1  # one function with one call at a time needs only one worker
        assert pathlib.Path(f"/proc/{child}").exists()
    assert not children()
    until(lambda: not is_running(child))
    rewards.close()  # a second call does nothing


SCRIPT = """
import os, sys, time
from podrl.rewards.compose import RewardConfig, Rewards

def stuck(prompts, completions, **fields):
    import re
    if completions[0] == "pid":
        return [float(os.getpid())]
    return [float(bool(re.fullmatch("(a|aa)+b", c))) for c in completions]

if __name__ == "__main__":
    rewards = Rewards(RewardConfig(fns=(stuck,), workers=1))
    print(int(rewards.score([""], ["pid"], {})[0, 0]), os.getpid(), flush=True)
    rewards.score([""], ["a" * 60], {})
"""


def test_a_worker_ends_with_a_parent_that_is_killed_while_its_function_hangs(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = dict(os.environ, PYTHONPATH=str(pathlib.Path(podrl.__file__).parents[1]))
    with subprocess.Popen(
        [sys.executable, "script.py"], cwd=tmp_path, stdout=subprocess.PIPE, env=environment, text=True
    ) as parent:
        assert parent.stdout is not None
        worker, pid = map(int, parent.stdout.readline().split())
        assert pid == parent.pid and worker != pid  # a function of the script itself runs in a worker
        time.sleep(0.2)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    until(lambda: not is_running(worker))


def test_a_script_without_a_main_guard_is_told_so(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT.replace('if __name__ == "__main__":', "if True:"))
    environment = dict(os.environ, PYTHONPATH=str(pathlib.Path(podrl.__file__).parents[1]))
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, env=environment, text=True, timeout=60
    )
    assert done.returncode == 1 and "under `if __name__ == '__main__':`" in done.stderr


def test_a_step_starts_no_process():
    with Rewards(RewardConfig(workers=2)) as rewards:
        fields = {"answer": ["4"] * 128, "question": ["How many eggs has Tom? " * 8] * 128}
        completions = [json.dumps({"text": "<reasoning>2+2=4.</reasoning><answer>4</answer>" * 3})] * 128
        rewards.score(fields["question"], completions, fields)
        before = children()
        for _ in range(5):
            rewards.score(fields["question"], completions, fields)
        assert len(before) == 2 and children() == before


@pytest.mark.parametrize(
    ("reward", "weight", "said"),
    [
        (1e300, 1e9, "inf.*answer contributes 1e\\+300 with the weight 1e\\+09"),
        (-1e39, 1.0, "-1e\\+39.*answer contributes -1e\\+39"),
        (np.nan, 1.0, "nan.*answer contributes nan"),
    ],
)
def test_a_sum_that_is_not_finite_names_function_and_sample(reward, weight, said):
    with Rewards(RewardConfig(fns=("answer", "number"), weights=(weight, 2.0))) as rewards:
        good_FB = np.array([[0.5, 1.0], [1.0, 0.0]]) / [[weight], [1.0]]
        np.testing.assert_allclose(rewards.combine(good_FB), [2.5, 1.0])
        bad_FB = good_FB.copy()
        bad_FB[0, 1] = reward
        with pytest.raises(RewardError, match=f"sample 1 of 2 add up to {said}.*reward.weights"):
            rewards.combine(bad_FB)
        lost_FB = good_FB.copy()
        lost_FB[:, 0] = np.nan  # a failed sample has no rewards, which is not an error of the functions
        np.testing.assert_array_equal(np.isnan(rewards.combine(lost_FB)), [True, False])


@pytest.mark.parametrize(
    ("completion", "own"),
    [
        ("42", "42"),
        ("a<tool_output>42</tool_output>b", "ab"),
        ("<tool_output>1</tool_output><tool_output>2</tool_output>3", "3"),
        ("3</tool_output>4", "3</tool_output>4"),
        ("5<tool_output>6", "5"),
        ("<tool_output>" * 100_000, ""),
    ],
)
def test_tool_outputs_in_whole_texts_are_not_the_models_words(completion, own):
    def same(prompts, completions, **fields):
        return [float(c == own and fields.get("sample_text", [completion]) == [completion]) for c in completions]

    assert score(RewardConfig(fns=(same,)), completion).tolist() == [[1.0]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"text": TextConfig(schema="s.json")}, r"reward\.text\.schema='s\.json' is read by json_schema alone"),
        ({"text": TextConfig(pattern="a+")}, r"reward\.text\.pattern='a\+' is read by regex alone"),
        ({"text": TextConfig(answer="gold")}, r"reward\.text\.answer='gold'"),
        ({"text": TextConfig(choices="AB")}, r"reward\.text\.choices='AB' is read by choice alone"),
        ({"judge": JudgeConfig(url="http://localhost:1")}, r"reward\.judge\.url=.* is read by judge and "),
        ({"code": CodeConfig(tests="checks")}, r"reward\.code\.tests='checks' is read by code alone"),
    ],
)
def test_a_setting_that_no_named_function_reads_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Rewards(RewardConfig(fns=("number",), **settings))


@pytest.mark.parametrize("fns", [{"fns": ("choice@mine", "number")}, {"named": ("choice",)}])
def test_a_setting_is_read_by_a_function_of_one_data_set(fns):
    with Rewards(RewardConfig(**fns, text=TextConfig(choices="AB"))) as rewards:
        assert rewards.names
