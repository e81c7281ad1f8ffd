"""Episodes in their workers: limits, faults of tools and environments, replay, the journal, leftover processes."""

import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from waits import PATIENCE_S, until

import podrl
from podrl.environments.calls import SEPARATOR
from podrl.environments.config import EnvironmentConfig
from podrl.environments.journal import Files, Journal
from podrl.environments.protocol import FULL, Task, Turn
from podrl.environments.workers import EnvironmentFailure, EpisodeEnd, EpisodeObservation, EpisodeReturn, Episodes
from podrl.workers.user_code import Limits

ACTS = pathlib.Path(__file__).parent / "acts.py"
TOOLS = [
    "calculator",
    "chance",
    "typed",
    "sleeps",
    "holds",
    "waits",
    "dies",
    "kills_its_group",
    "leaves",
    "floods",
    "huge",
    "raw_bytes",
    "surrogates",
    "surrogates_within",
    "closes",
    "leaves_a_child",
    "seen",
]
TASK = Task("p")


def config(environment="tools", tools=(), **settings):
    environment = environment if environment == "tools" else f"{ACTS}:{environment}"
    return EnvironmentConfig(environment=environment, tools=tuple(f"{ACTS}:{tool}" for tool in tools), **settings)


def call(tool, query="", **attributes):
    words = "".join(f' {name}="{value}"' for name, value in attributes.items())
    return Turn(f'<call_tool name="{tool}"{words}>{query}</call_tool>', "</call_tool>")


def play(episodes, turns, task=TASK, number=0):
    """Plays one episode; its turns come from a list, or from a function of each observation. Returns (observations,
    end)."""
    says: list[EpisodeObservation] = []
    if isinstance(turns, list):
        left = iter(turns)
        answer = lambda _: next(left)  # noqa: E731
    else:
        answer = turns
    episodes.start(number, task)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        for message in episodes.poll(1.0):
            if isinstance(message, EpisodeEnd):
                return says, message
            says.append(message)
            episodes.turn(number, answer(message))
    raise AssertionError(
        f"the episode did not end after the observations {says}; calls that still wait: {episodes.waiting()}"
    )


def outputs(says):
    return [say.observation.removeprefix("\n<tool_output>").removesuffix("</tool_output>\n\n") for say in says[1:]]


@pytest.fixture(scope="module")
def tools():
    """Starts one set of workers with all tools, shared by tests that need no other settings."""
    made = config(tools=TOOLS, max_tool_calls=50, call_deadline_s=1.0, concurrency=2)
    with Episodes(made, Limits(environment=("MY_API_KEY",)), journal=None) as episodes:
        yield episodes


def test_a_sample_calls_a_tool_and_goes_on(tools):
    says, done = play(tools, [call("calculator", "40+2"), Turn("<answer>42</answer>")])
    assert [say.observation for say in says] == ["", "\n<tool_output>42</tool_output>\n\n"]
    assert all(say.stop == ("</call_tool>", "</call>") and say.role == "raw" for say in says)
    ((record,),) = [say.records for say in says[1:]]
    assert record | {"seconds": 0} == {"by": "calculator", "text": "42", "seconds": 0, "failed": "", "replayed": False}
    assert (done.reward, done.metrics, done.text, done.reason) == (None, {}, None, "ended")
    assert [says[1].observation[a:b] for group in says[1].cuts for a, b in group] == ["42"]
    assert says[1].cut_tokens == 1024


def test_every_call_is_told_of_with_its_time_and_failure(tmp_path):
    """Answers from the journal are not calls and are not reported."""
    told = []
    task = Task("p", index=1, sample=2, step=3)
    turns = [call("calculator", "40+2"), call("calculator", "no sum"), Turn("end")]
    began = time.monotonic()
    for _ in range(2):
        journal = Journal(Files(tmp_path / "outside"))
        with Episodes(
            config(tools=["calculator"]), Limits(), journal=journal, on_call=lambda *of: told.append(of)
        ) as episodes:
            says, _ = play(episodes, turns, task)
    assert outputs(says)[0] == "42"
    assert [(of, name, failed) for of, name, _, _, failed in told] == [
        (task, "calculator", ""),
        (task, "calculator", "exception"),
    ]
    assert all(began < started <= ended < time.monotonic() for _, _, started, ended, _ in told)


def test_calls_of_chat_models_are_answered_by_messages_of_tools():
    """Two calls in one turn give two messages. A turn that a limit ended has no calls, whatever its text is."""
    text = '<tool_call>{"name": "calculator", "arguments": {"query": "%s"}}</tool_call>'
    with Episodes(config(tools=["calculator"], parser="qwen3"), Limits(), journal=None) as episodes:
        assert episodes.parser == "qwen3"
        says, _ = play(episodes, [Turn(text % "1+1" + text % "2+2"), Turn(text % "3+3", "length")])
    assert [(say.observation, say.role, say.stop) for say in says] == [
        ("", "raw", ()),
        (f"2{SEPARATOR}4", "tool", ()),
    ]
    assert [record["text"] for record in says[1].records] == ["2", "4"]


def test_declarations_are_those_of_the_functions(tools):
    declared = {tool["function"]["name"]: tool["function"] for tool in tools.tools}
    assert list(declared) == TOOLS
    assert declared["calculator"]["description"] == "Value of a sum of whole numbers."
    assert declared["typed"]["parameters"] == {
        "type": "object",
        "properties": {"query": {"type": "string"}, "times": {"type": "integer"}, "loud": {"type": "boolean"}},
        "required": ["query"],
    }


def test_a_schema_has_choices_and_descriptions_and_a_tool_knows_its_sample():
    task = Task("p", {"name": "n"}, step=3, index=2, sample=1)
    asked = [
        call("chosen", depth="deep", order="old", sites="[2]", most="3"),
        call("chosen", depth="deeper"),
        call("chosen", order="oldest"),
        call("now"),
        call("whose", "x"),
        call("whose", "x", task="mine"),
    ]
    with Episodes(config(tools=["chosen", "now", "whose"]), Limits(), journal=None) as episodes:
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in episodes.tools}
        says, _ = play(episodes, [*asked, Turn("end")], task)
    assert schemas["chosen"]["properties"] == {
        "depth": {"type": "string", "enum": ["shallow", "deep"], "description": "how far, and how long."},
        "order": {"type": "string", "enum": ["new", "old"], "description": "which come first."},
        "sites": {"type": "array", "items": {"type": "integer", "enum": [1, 2]}, "description": "where to look"},
        "most": {"type": "integer"},
        "free": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
    }
    assert schemas["now"]["properties"] == {}
    assert schemas["whose"] == {
        "type": "object",
        "properties": {"query": {"type": "string", "description": "the text"}},
        "required": ["query"],
    }
    assert outputs(says) == [
        "DEEP old [2] 3 0",
        "ValueError: depth must be one of 'shallow', 'deep'",
        "ValueError: order must be one of 'new', 'old'",
        "noon",
        "x of train 3 2 1 n",
        "TypeError: got an unexpected keyword argument 'task'",
    ]


@pytest.mark.parametrize("most", [0, 1, 2, 3])
def test_exactly_so_many_calls_are_run(most):
    with Episodes(config(tools=["calculator"], max_tool_calls=most), Limits(), journal=None) as episodes:
        says, done = play(episodes, lambda say: call("calculator", "1+1"))
    assert outputs(says) == ["2"] * most + ["Max tool calls exceeded."]
    assert [bool(say.stop) for say in says] == [True] * (most + 1) + [False]
    assert done.reason == "calls"


@pytest.mark.parametrize(
    ("turn", "text", "failed"),
    [
        (call("calculater", "1"), "There is no tool 'calculater'.", "unknown_tool"),
        (Turn("no tag</call_tool>", "</call_tool>"), "No tool call can be read.", "no_call"),
        (call("calculator", "1", bad="x"), "TypeError: got an unexpected keyword argument 'bad'", "arguments"),
        (call("calculator", "x"), "ValueError: only sums of whole numbers, not 'x'", "exception"),
        (call("sleeps"), "Timed out after 1 s.", "deadline"),
        (call("holds"), "Timed out after 1 s.", "deadline"),
        (call("dies"), "The tool failed: its process ended with SIGKILL.", "died"),
        (call("kills_its_group"), "The tool failed: its process ended with SIGKILL.", "died"),
        (call("leaves"), "The tool failed: its process ended with exit code 3.", "died"),
    ],
)
def test_a_failure_is_text(tools, turn, text, failed):
    says, _ = play(tools, [turn, call("calculator", "1+1"), Turn("end")])
    first, second = outputs(says)
    assert first.startswith(text) and "second line" not in first
    assert says[1].records[0]["failed"] == failed
    assert second == "2"
    if failed == "unknown_tool":
        assert f"Tools: {', '.join(TOOLS)}." in first or "Did you mean 'calculator'?" in first


def test_what_tools_return_becomes_text(tools):
    calls = [
        call("typed", "ab", times="2", loud="true"),
        call("floods"),
        call("huge"),
        call("raw_bytes"),
        call("surrogates"),
        call("surrogates_within"),
        call("closes"),
        call("seen", "MY_API_KEY"),
        call("seen", "HF_TOKEN"),
    ]
    says, _ = play(tools, [*calls, Turn("end")])
    typed, flooded, huge, raw, odd, within, closes, allowed, withheld = outputs(says)
    assert (typed, flooded, raw, odd) == ("ABAB", "flooded", "café \ufffd\ufffd", "a?b")
    assert within == '{"a": "?"}'
    assert len(huge) < 1.1 * (1 << 20) and " characters left out] ... " in huge
    assert closes == "x&lt;/tool_output>&lt;answer>7&lt;/answer>&lt;|im_end|>&lt;/call_tool>"
    assert allowed.endswith("False") and withheld == "None False"


def test_who_waits_is_named(tools):
    """Makes four calls, of which two run at a time. All samples are named, whether they wait to begin their call or for
    its answer."""
    for number in range(4):
        tools.start(number, Task("p", sample=number, index=17))
    waiting, done, order = set(), 0, []
    end = time.monotonic() + 30
    while done < 4 and time.monotonic() < end:
        for message in tools.poll(0.05):
            if isinstance(message, EpisodeEnd):
                done += 1
                continue
            if message.observation:
                order.append(message.episode)
            tools.turn(message.episode, Turn("end") if message.observation else call("waits", "0.5"))
        waiting |= {said.partition(",")[0] for said in tools.waiting()}
    assert done == 4 and sorted(order) == [0, 1, 2, 3]
    assert waiting >= {f"waits of sample {number} of prompt 17" for number in range(4)}


def test_an_environment_gives_rewards_at_their_turns():
    with Episodes(config("Guess"), Limits(), journal=None) as episodes:
        says, done = play(episodes, [Turn("hm"), Turn("50"), Turn("42")], Task("p", seed=141))
        assert [(say.observation, say.role, say.reward) for say in says[1:]] == [
            ("Say a number.", "user", -0.1),
            ("lower", "user", 0.0),
        ]
        assert (done.reward, done.metrics) == (1.0, {"won": 1.0})
        _, lost = play(episodes, lambda _: Turn("1"), Task("p", seed=141), number=1)
        assert lost.reward == 0.0
        says, full = play(episodes, [Turn("1"), Turn("", FULL)], Task("p", seed=141), number=2)
        assert (len(says), full.reward, full.reason) == (2, None, "ended")


def test_a_game_is_played_with_tools():
    with Episodes(config("async_tools"), Limits(), journal=None) as episodes:
        assert [tool["function"]["name"] for tool in episodes.tools] == ["calculator"]
        says, done = play(episodes, [call("calculator", "40+2"), Turn("41"), Turn("42")], Task("p", seed=41))
        assert [say.observation for say in says] == ["", "\n<tool_output>42</tool_output>\n\n", "higher"]
        assert done.reward == 1.0


def test_turns_are_bounded():
    with Episodes(config("Endless", max_turns=3), Limits(), journal=None) as episodes:
        says, done = play(episodes, lambda _: Turn("x"))
    assert (len(says), done.reason) == (3, "turns")


def test_a_role_that_there_is_not_names_those_that_there_are():
    with (
        Episodes(config("Systemic"), Limits(), journal=None) as episodes,
        pytest.raises(EnvironmentFailure, match=r"(?s)acts\.py.*role='system' must be one of 'raw', 'user', 'tool'"),
    ):
        play(episodes, lambda _: Turn("x"))


def test_what_an_environment_raises_ends_the_job():
    with (
        Episodes(config("Raises"), Limits(), journal=None) as episodes,
        pytest.raises(
            EnvironmentFailure, match=r"(?s)Raises of sample 2 of prompt 5 \(step 1, after turn 1.*such board"
        ),
    ):
        play(episodes, lambda _: Turn("x"), Task("p", index=5, sample=2))


def test_an_episode_ends_at_its_deadline():
    with Episodes(config("Slow", deadline_s=0.3), Limits(), journal=None) as episodes:
        says, done = play(episodes, lambda _: Turn("x"))
        assert (len(says), done.reason, done.reward) == (1, "deadline", None)
        assert episodes.waiting() == []


@pytest.mark.parametrize("what", ["process", "interpreter"])
def test_code_that_blocks_costs_its_own_episode_only(what):
    """One of a worker's three episodes sleeps for ever: it is dropped, and the others go on in a new worker."""
    with Episodes(config("Blocks", blocked_s=1.0), Limits(), journal=None) as episodes:
        for number in range(3):
            episodes.start(number, Task("p", {"blocks": what * (number == 1)}, sample=number))
        done, says = {}, []
        end = time.monotonic() + 30
        waiting: list[EpisodeObservation] = []
        while len(done) < 3 and time.monotonic() < end:
            for message in episodes.poll(0.2):
                if isinstance(message, EpisodeEnd):
                    done[message.episode] = message
                    continue
                says.append((message.episode, message.observation))
                waiting.append(message)
            if len(says) == 3 and waiting:  # all wait for a turn: now the second blocks before the third goes on
                for number in (0, 1, 2):
                    episodes.turn(number, Turn(f"t{number}"))
                waiting = []
            elif len(says) > 3:
                for message in waiting:
                    episodes.turn(message.episode, Turn("end"))
                waiting = []
    assert {number: one.reason for number, one in done.items()} == {0: "ended", 1: "deadline", 2: "ended"}
    assert sorted(says) == [(0, ""), (0, "seen t0"), (1, ""), (2, ""), (2, "seen t2")]


def test_no_episode_answers_for_others_that_block():
    """Four episodes block one after the other, and each costs its worker, in which a fifth episode waits. An episode
    that loses three workers ends the job, but workers that are lost through other episodes do not count."""
    with Episodes(config("Blocks", blocked_s=0.5), Limits(), journal=None) as episodes:
        episodes.start(0, Task("p"))
        (waits,) = episodes.poll(30)
        for number in range(1, 5):
            _, done = play(episodes, [Turn("now")], Task("p", {"blocks": "process"}, sample=number), number)
            assert done.reason == "deadline"
        episodes.turn(waits.episode, Turn("late"))
        (say,) = episodes.poll(30)
        assert say.observation == "seen late"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Dies", "its process ended with SIGKILL"),
        ("Scribbles", "it sent something other than an answer: a message that is not JSON"),
    ],
)
def test_a_worker_that_always_dies_ends_the_job(name, why):
    died = rf"(?s){name} of sample 2 of prompt 5 .*after turn 1.* lost 3 workers in a row: {why}"
    with Episodes(config(name), Limits(), journal=None) as episodes, pytest.raises(EnvironmentFailure, match=died):
        play(episodes, lambda _: Turn("a"), Task("p", index=5, sample=2))


def test_what_an_environment_says_is_text():
    with Episodes(config("Mumbles"), Limits(), journal=None) as episodes:
        says, _ = play(episodes, lambda _: Turn("a"))
    assert says[0].observation == "a?b"


@pytest.mark.parametrize("most", [1, 3])
def test_no_more_calls_at_once_than_are_allowed(most, tmp_path):
    made = config(tools=["logged"], concurrency=most, call_deadline_s=PATIENCE_S)
    with Episodes(made, Limits(), journal=None) as episodes:
        assert most_at_once(episodes, tmp_path / "log", samples=12, least=most) == most


def most_at_once(episodes, log, samples, least):
    """Returns the largest number of overlapping calls of the tool `logged`, from its file; `least` calls wait for each
    other."""
    log.with_name(f"{log.name}.least").write_text(str(least))
    for number in range(samples):
        episodes.start(number, Task("p", sample=number))
    done, end = 0, time.monotonic() + PATIENCE_S
    while done < samples and time.monotonic() < end:
        for message in episodes.poll(1.0):
            if isinstance(message, EpisodeEnd):
                done += 1
            else:
                episodes.turn(message.episode, Turn("end") if message.observation else call("logged", str(log)))
    at_once = list(itertools.accumulate({"begin": 1, "end": -1}[word] for word in log.read_text().split()))
    assert len(at_once) == 2 * samples and at_once[-1] == 0
    return max(at_once)


def test_an_episode_goes_on_after_its_worker_died(tmp_path):
    """The worker is killed between two turns: the replay uses the recorded answer, and only the new observation
    comes."""
    with Episodes(config("DiesOnce"), Limits(), journal=None) as episodes:
        says, done = play(episodes, [Turn("a"), Turn("bb")], Task("p", {"mark": str(tmp_path / "died")}))
    assert (tmp_path / "died").exists()
    assert says[1].observation == f"{says[0].observation} a"
    assert (len(says), done.reward) == (2, 2.0)


def test_an_observation_that_differs_on_a_replay_is_refused(tmp_path):
    with (
        Episodes(config("Differs"), Limits(), journal=None) as episodes,
        pytest.raises(
            EnvironmentFailure,
            match=r"(?s)did not repeat its observation on a replay, at turn 0: first observation='0\.\d+', then",
        ),
    ):
        play(episodes, [Turn("a"), Turn("bb")], Task("p", {"mark": str(tmp_path / "died")}))


def test_answers_come_from_the_journal_of_the_run_before(tmp_path):
    """In a run that is started again, a tool that answers at random gives the answers of the killed run."""
    task = Task("p", step=7, index=2, sample=1)
    turns = [call("chance", "a"), call("chance", "b"), Turn("end")]
    made = config(tools=["chance"])

    def run(turns, task=task):
        files = Files(tmp_path)
        with Episodes(made, Limits(), journal=Journal(files)) as episodes:
            says, _ = play(episodes, list(turns), task)
        files.close()
        return outputs(says), [record["replayed"] for say in says for record in say.records]

    first, _ = run(turns)
    assert run(turns) == (first, [True, True])
    lines = (tmp_path / "7.jsonl").read_text().splitlines(keepends=True)
    assert len(lines) == 2 and json.loads(lines[0])["answer"]["text"] == first[0]
    (tmp_path / "7.jsonl").write_text(lines[0] + lines[1][:20])  # the run was killed while it wrote the second record
    again, replayed = run(turns)
    assert again[0] == first[0] and again[1] != first[1] and replayed == [True, False]
    assert run(turns) == (again, [True, True])
    other, replayed = run([turns[1], turns[0], turns[2]])  # recorded answers do not answer other requests
    assert set(other).isdisjoint(again) and replayed == [False, False]
    evaluated, replayed = run(turns, Task("p", step=7, index=2, sample=1, mode="eval"))
    assert set(evaluated).isdisjoint(again) and replayed == [False, False]
    Files(tmp_path).drop(before=8)
    assert list(tmp_path.iterdir()) == []


def test_a_conversation_is_recorded_with_its_routes_or_not_at_all(tmp_path):
    """An episode that is cancelled while its record waits for routes has no record, and begins again."""
    columns, routes = {"tokens": "AA"}, {"width": 2, "bytes": "AAAA"}

    def heard(count):
        messages, end = [], time.monotonic() + PATIENCE_S
        while len(messages) < count and time.monotonic() < end:
            messages += episodes.poll(1.0)
        return sorted(messages, key=lambda message: message.episode)

    with Episodes(config("Asks"), Limits(), journal=Journal(Files(tmp_path), exact=False)) as episodes:
        for number in range(2):
            episodes.start(number, Task("p", index=number, step=3))
        for said in heard(2):
            episodes.turn(said.episode, Turn("4"), columns)
        assert heard(2) == [EpisodeReturn(0), EpisodeReturn(1)]
        assert not list(tmp_path.iterdir())
        episodes.cancel(0)
        for number in range(2):
            episodes.record(number, [routes])
        (done,) = heard(1)
        assert (done.episode, done.reward, done.reason) == (1, 1.0, "ended")
        for number in (2, 3):
            episodes.start(number, Task("p", index=number - 2, step=3))
        assert [said.drawn for said in heard(2)] == [None, {**columns, "routes": routes}]


def test_what_outside_raises_is_recorded(tmp_path):
    for replayed in (False, True):
        files = Files(tmp_path)
        with Episodes(config("Outside"), Limits(), journal=Journal(files)) as episodes:
            _, done = play(episodes, [])
        files.close()
        assert done.text == "KeyError: 'gone'"
        assert len((tmp_path / "0.jsonl").read_text().splitlines()) == 1, replayed


def test_nothing_is_left_behind():
    before = set(processes())
    with Episodes(config(tools=["leaves_a_child", "sleeps"]), Limits(), journal=None) as episodes:
        says, _ = play(episodes, [call("leaves_a_child"), Turn("end")])
        child = int(outputs(says)[0])
        episodes.start(1, Task("p"))
        (say,) = episodes.poll(5)
        episodes.turn(say.episode, call("sleeps"))
        while not episodes.waiting():
            time.sleep(0.01)
        deadline = time.monotonic() + 10  # the child's command is not readable until exec has ended
        while child not in processes():
            assert time.monotonic() < deadline, child
            time.sleep(0.01)
    until(lambda: not set(processes()) - before, "the end of all processes")


DETACHES = """
import os, sys
sys.path[:0] = {path!r}
from test_played_episodes import *
if __name__ == "__main__":
    with Episodes(config(tools=["leaves_a_daemon"]), Limits(), journal=None) as episodes:
        play(episodes, [call("leaves_a_daemon"), Turn("end")])
        if sys.argv[1] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("how", ["ended", "killed"])
def test_what_a_tool_detached_ends_with_the_job(how, tmp_path):
    """A process that a tool left behind ends when the job ends or is killed, although it shares neither parent, nor
    group, nor session with the tool."""
    before = set(processes())
    (tmp_path / "job.py").write_text(DETACHES.format(path=[str(ACTS.parent), str(ACTS.parents[1])]))
    code = subprocess.run([sys.executable, tmp_path / "job.py", how], check=False).returncode
    assert code == (-signal.SIGKILL if how == "killed" else 0)
    deadline = time.monotonic() + 300
    while set(processes()) - before:
        assert time.monotonic() < deadline, f"these processes still run: {set(processes()) - before}"
        time.sleep(0.02)


def test_a_cancelled_episode_is_silent(tools):
    tools.start(5, Task("p"))
    (say,) = tools.poll(5)
    tools.turn(5, call("waits", "0.3"))
    tools.cancel(5)
    assert say.episode == 5 and tools.poll(0.6) == []
    says, _ = play(tools, [call("calculator", "1+1"), Turn("end")], number=6)
    assert outputs(says) == ["2"]


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: config("Nobody"), "Nobody.*has no function"),
        (lambda: EnvironmentConfig(environment="/nowhere.py:X"), "the file /nowhere.py does not exist"),
        (lambda: config("TOOLS_OF_NOBODY.run"), "cannot be loaded"),
        (lambda: config("calculator"), "calculator is a function: name a class"),
        (lambda: config(tools=["nothing"]), "nothing.*cannot be loaded"),
        (lambda: EnvironmentConfig(environment="tools", tools=("abacus",)), "not a built-in tool"),
        (
            lambda: config(tools=["calculator", "calculator"]),
            r"names '.*acts\.py:calculator' twice: name each tool once",
        ),
        (lambda: EnvironmentConfig(environment="tools"), "has no tools"),
        (lambda: config("Guess", others=(f"{ACTS}:Nobody",)), "env.others: .*Nobody.*has no function"),
        (lambda: config("Guess", others=("game",)), "EnvironmentConfig.others: 'game' must be 'none'"),
        (lambda: config("Guess", others=("tools",)), "has no tools"),
        (
            lambda: EnvironmentConfig(others=("none",)),
            r"EnvironmentConfig.others=\('none',\) needs EnvironmentConfig.environment",
        ),
        (lambda: config(tools=["calculator"], others=("none",), parser="hermes"), "every prompt names the tools"),
        (lambda: EnvironmentConfig(environment="nothing"), "must be '' \\(none\\), 'tools'"),
        (lambda: EnvironmentConfig(environment="tools", tools=("google_search",)), "no server in env.mcp has"),
    ],
)
def test_what_cannot_be_loaded_is_said_at_the_start(made, said):
    before = set(processes())
    with pytest.raises(ValueError, match=rf"(?s){said}"):
        Episodes(made(), Limits(), journal=None).close()
    until(lambda: not set(processes()) - before, "the end of all processes")


def test_a_record_names_its_environment():
    others = (f"{ACTS}:Guess", "none")
    settings = EnvironmentConfig(environment="tools", tools=("calculator",), others=others, workers=2)
    wanted = call("calculator", "2+2")
    with Episodes(settings, Limits(), journal=None) as episodes:
        for named, turns, outcome in [
            ({}, [wanted, Turn("end")], (1, None)),  # env.environment is the default, and runs the call
            ({"env": "somebody's"}, [wanted, Turn("end")], (1, None)),  # no environment's name: the default
            ({"env": "none"}, [wanted], (0, None)),
            ({"env": others[0]}, [Turn("5")] * 9, (6, 0.0)),
        ]:
            says, done = play(episodes, turns, Task("p", named))
            assert (len(says) - 1, done.reward) == outcome, named
        assert [tool["function"]["name"] for tool in episodes.tools] == ["calculator"]


def test_a_tool_without_a_name_is_refused():
    with pytest.raises(ValueError, match="define it with `def`"):
        podrl.ToolEnvironment(lambda query: query)


def processes():
    """Lists the live descendants of this process, and live orphans of its workers."""
    found = []
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            command = (stat.parent / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state != "Z" and (int(parent) == os.getpid() or command == b"sleep\x001000\x00"):
            found.append(int(stat.parent.name))
    return found
