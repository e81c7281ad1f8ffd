"""Built-in rewards beyond the reference ones: R1 format, math equivalence, a judge over HTTP, rewards per data set."""

import contextlib
import dataclasses
import http.server
import importlib.util
import json
import sys
import threading

import numpy as np
import pytest

from podrl.rewards.compose import NamedRewards, RewardConfig, RewardError, Rewards
from podrl.rewards.formats import r1_format
from podrl.rewards.judge import JudgeConfig
from podrl.rewards.math_answer import math_equal
from podrl.runtime.service import ServiceError


def score(config, *completions, prompts=(), **fields):
    with Rewards(config) as rewards:
        return rewards.score(list(prompts) or ["question"] * len(completions), list(completions), fields)


@pytest.mark.parametrize(
    ("prompt", "completion", "expected"),
    [
        ("Q", "<think>a</think><answer>1</answer>", 1.0),
        ("Q", "\n<think>a\nb</think>\n\n<answer>1</answer>\n", 1.0),
        ("Q <think>\n", "a</think><answer>1</answer>", 1.0),
        ("Q", "a</think><answer>1</answer>", 0.0),
        ("Q", "So: <think>a</think><answer>1</answer>", 0.0),
        ("Q", "<think>a</think>then<answer>1</answer>", 0.0),
        ("Q", "<think>a</think><answer>1</answer><answer>2</answer>", 0.0),
        ("Q", "<think>a</think><answer>1", 0.0),
    ],
)
def test_r1_format(prompt, completion, expected):
    assert r1_format([prompt], [completion]) == [expected]


def test_a_function_for_one_data_set_sees_only_its_records():
    config = RewardConfig(fns=("number@gsm8k", "r1_format@r1", "r1_format"), weights=(2.0, 1.0, 0.5), workers=1)
    good, plain = "<think>t</think><answer>7</answer>", "<answer>7</answer>"
    fields = {"answer": ["7", "7", "7"], "dataset": ["gsm8k", "r1", "other"]}
    with Rewards(config) as rewards:
        reward_FB = rewards.score(["q"] * 3, [plain, good, good], fields)
        assert rewards.names == NamedRewards(config).names == ("number@gsm8k", "r1_format@r1", "r1_format")
        np.testing.assert_array_equal(reward_FB, [[1.5, 0, 0], [0, 1, 0], [0, 1, 1]])
        np.testing.assert_array_equal(rewards.combine(reward_FB), [3.0, 1.5, 0.5])
        with pytest.raises(RewardError, match=r"number@gsm8k.*'dataset' \(reward.dataset_field\)"):
            rewards.score(["q"], [plain], {"answer": ["7"]})
    with pytest.raises(ValueError, match="name of a data set"):
        Rewards(RewardConfig(fns=("answer@",)))


@pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="extra [math] is not installed")
def test_math_equivalence():
    tagged = [f"<reasoning>.</reasoning><answer>{x}</answer>" for x in ("0.5", "\\frac{1}{2}", "2/4", "0.51", "", "x")]
    assert math_equal([""] * 6, tagged, ["1/2"] * 6) == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    boxed = ["So it is \\boxed{\\sqrt{8}}.", "So it is $2\\sqrt{2}$.", "no idea"]
    assert math_equal([""] * 3, boxed, ["2\\sqrt{2}"] * 3) == [1.0, 1.0, 0.0]
    with pytest.raises(ValueError, match="reference answer ''"):
        math_equal([""], ["<answer>1</answer>"], [""])
    # In a worker the function runs on the main thread. The deadline is long because the first batch imports sympy.
    config = RewardConfig(fns=("math_equal",), workers=1, deadline_s=180.0)
    np.testing.assert_array_equal(score(config, *tagged[:4], answer=["1/2"] * 4), [[1, 1, 1, 0]])


def test_a_reference_in_dollars_of_money():
    texts = ["<answer>18</answer>", r"<answer>\$18</answer>", r"\boxed{19}"]
    assert math_equal(["q"] * 3, texts, [r"\$18"] * 3) == [1.0, 1.0, 0.0]


def test_math_without_its_extra_says_which(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)  # its import fails, whether it is installed or not
    with pytest.raises(ImportError, match=r"pip install .*\[math\]'"):
        math_equal([""], ["<answer>1</answer>"], ["1"])


class Endpoint(http.server.BaseHTTPRequestHandler):
    """A judge's endpoint, whose answer depends on the first word of the text to be graded."""

    requests: list
    failures: dict
    elsewhere = ""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = body["messages"][0]["content"]
        self.requests.append((self.path, body, self.headers.get("Authorization")))
        word = question.rpartition("grade: ")[2].split()[0]
        left = self.failures.get(word, 0)
        self.failures[word] = left - 1
        if word == "forbidden":
            return self._send(401, b"no key")
        if left > 0:
            return self._send(503, b"busy")
        if word == "elsewhere":
            return self._send(307, b"", Location=self.elsewhere)
        text = {"silent": "I would rather not say.", "many": "SCORE: 3 of course not. SCORE: 11"}.get(
            word, f"Fine. SCORE: {word}"
        )
        return self._send(200, json.dumps({"choices": [{"message": {"content": text}}]}).encode())

    def _send(self, code, content, **headers):
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        pass


@contextlib.contextmanager
def endpoint(**failures):
    """Starts a local judge; yields (reward settings that name the judge, the list of the requests that it gets)."""
    handler = type("Handler", (Endpoint,), {"requests": [], "failures": dict(failures)})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        template = "{prompt} | {answer} | max {max_score} | grade: {completion}"
        url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        settings = JudgeConfig(
            url=url, model="m", template=template, retries=1, timeout_s=5.0, key_variable="JUDGE_KEY"
        )
        yield RewardConfig(fns=("judge",), workers=1, deadline_s=20.0, judge=settings), handler.requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_the_judge_scores_and_retries(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    with endpoint(**{"7.5": 1}) as (config, requests):  # the judge is busy once, then answers
        reward_FB = score(config, "7.5 {answer}", "0 x", "10 y", prompts=["q {completion}", "r", "s"], answer=[1, 2, 3])
        np.testing.assert_allclose(reward_FB, [[0.75, 0.0, 1.0]])
        assert len(requests) == 4
        path, body, key = requests[0]
        assert path == "/v1/chat/completions" and body["model"] == "m" and key == "Bearer secret"
        assert "q {completion} | 1 | max 10 | grade: 7.5 {answer}" in {r[1]["messages"][0]["content"] for r in requests}


@pytest.mark.parametrize(
    ("completion", "message"),
    [
        (
            "silent x",
            r"in 2 requests; the last one failed: ValueError: the reply 'I would rather not say.' has no line",
        ),
        ("many x", r"the score 11 is not between 0 and 10"),
        ("forbidden x", r"in 1 request; the last one failed: HTTP 401 .*: 'no key'"),
    ],
)
def test_a_judge_that_gives_no_score_is_an_error_and_never_0(completion, message, monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with endpoint() as (config, _), pytest.raises(RewardError, match=message) as error:
        score(config, "5 ok", completion)
    assert not isinstance(error.value, ServiceError)
    assert "reward.judge.url" in str(error.value) and "sample 1 of 2" in str(error.value)


def test_a_judge_nobody_runs():
    with pytest.raises(ValueError, match=r"reward.judge.url"):
        Rewards(RewardConfig(fns=("judge",)))
    with pytest.raises(ValueError, match="http://"):
        JudgeConfig(url="ftp://x")
    with pytest.raises(ValueError, match="completion"):
        JudgeConfig(template="grade it")


def test_a_rubric_asks_about_every_criterion():
    template = "{prompt} | {criterion} | {max_score} | grade: {completion}"
    with endpoint() as (config, requests):
        settings = dataclasses.replace(
            config.judge, criterion_template=template, max_score=2.0, criteria=("polite",), criteria_weights=(3.0,)
        )
        config = dataclasses.replace(config, fns=("rubric",), judge=settings)
        rubric = [{"criterion": "cites", "weight": 3}, "brief", {"criterion": "invents", "weight": -2}]
        found = score(config, "1 x", "2 y", "1.5 z", prompts=["q", "r", "s"], rubric=[rubric, ["only"], None])
        np.testing.assert_allclose(found, [[(3 + 1 - 2) * 0.5 / 4, 1.0, 0.75]])
        asked = sorted(r[1]["messages"][0]["content"].split(" | ")[1] for r in requests)
        assert asked == ["brief", "cites", "invents", "only", "polite"]
        with pytest.raises(RewardError, match=r"must be a list of texts, or of"):
            score(config, "1 x", rubric=[[{"weight": 1}]])
        with pytest.raises(RewardError, match=r"no criterion of positive weight.*reward.judge.criteria"):
            score(config, "1 x", rubric=[[{"criterion": "c", "weight": -1}]])
    with pytest.raises(ValueError, match="1 value for 2"):
        JudgeConfig(criteria=("a", "b"), criteria_weights=(1.0,))
    with pytest.raises(ValueError, match="criterion_template"):
        JudgeConfig(criterion_template="{completion}")


def test_a_judge_that_is_away_is_asked_until_it_is_back():
    with endpoint(**{"3": 5}) as (config, requests):  # busy more often than the one retry after a bad answer
        np.testing.assert_allclose(score(config, "3 busy"), [[0.3]])
        assert len(requests) == 6


@pytest.mark.parametrize("away", ["busy", "gone"])
def test_a_judge_that_stays_away_ends_the_job_in_a_way_that_a_restart_cures(away):
    with endpoint(**{"3": 10**6}) as (config, _):
        busy = dataclasses.replace(config, deadline_s=1.0)
        if away == "busy":
            with pytest.raises(ServiceError) as error:
                score(busy, "5 ok", "3 busy")
    if away == "gone":  # no server listens there any more
        with pytest.raises(ServiceError) as error:
            score(busy, "5 ok")
    text = str(error.value)
    assert isinstance(error.value, RewardError) and "\n" not in text and "reward.deadline_s=1 " in text
    assert "reward.judge.url" in text and ("503" if away == "busy" else "refused") in text


def test_the_judges_token_follows_no_redirect(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    with endpoint() as (other, stolen), endpoint() as (config, requests):
        there = f"{other.judge.url}/chat/completions"
        monkeypatch.setattr(Endpoint, "elsewhere", there)
        with pytest.raises(RewardError, match=rf"HTTP 307 \(it points to {there}, and requests follow no redirects"):
            score(config, "elsewhere x")
        assert requests and stolen == []
