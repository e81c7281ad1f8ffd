"""The server of podrl.view: its answers for complete, damaged and growing runs, and the requests that it refuses."""

import dataclasses
import importlib.util
import itertools
import json
import os
import pathlib
import re
import sys

import numpy as np
import pytest
from made_runs import HOSTILE, damaged, made, with_tools

from podrl import doctor
from podrl.rundir.metrics import LogConfig
from podrl.storage import lock
from podrl.view.__main__ import main
from podrl.view.report import report
from podrl.view.runs import RunFiles, critical_path, typical_step

pytest.importorskip("starlette", reason="needs the extra [view]")
pytest.importorskip("uvicorn", reason="needs the extra [view]")
from podrl.view.server import application
from podrl.view.units import unit


class Client:
    """A client that sends requests to an ASGI application in this thread, without a socket."""

    def __init__(self, app, host="localhost"):
        self._app, self._host = app, host

    def __call__(self, path, method="GET", **headers):
        """Sends one request; returns (status, headers, body)."""
        import asyncio

        sent, asked = [], []

        async def receive():
            if asked:
                await asyncio.Event().wait()  # the client never hangs up
            asked.append(True)
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message):
            sent.append(message)

        bare, _, query = path.partition("?")
        given = {"host": self._host} | headers
        scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http"}
        scope |= {"path": bare, "raw_path": bare.encode(), "query_string": query.encode(), "root_path": ""}
        scope |= {"headers": [(k.encode(), v.encode()) for k, v in given.items()], "client": None, "server": None}
        asyncio.run(self._app(scope, receive, send))
        found = {k.decode().lower(): v.decode() for k, v in sent[0]["headers"]}
        return sent[0]["status"], found, b"".join(message.get("body", b"") for message in sent[1:])

    def json(self, path):
        status, _, body = self(path)
        assert status == 200, body
        return json.loads(body)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    made(folder / "one", steps=12, max_steps=12)
    made(folder / "two", steps=5, max_steps=50, seed=1)
    return folder


@pytest.fixture(scope="module")
def ask(runs):
    return Client(application([RunFiles(str(runs / "one")), RunFiles(str(runs / "two"))]))


@pytest.mark.parametrize("view", ["curves", "timeline", "groups", "samples", "run"])
def test_every_view_has_an_address_of_its_own(ask, view):
    status, headers, body = ask(f"/{view}?run=0")
    assert status == 200 and headers["content-type"].startswith("text/html")
    needed = re.findall(r'(?:src|href)="([^"]+)"', body.decode())
    assert needed and all(path.startswith("/static/") for path in needed), (
        "the page loads files only from its own server"
    )
    assert all(ask(path)[0] == 200 for path in needed)
    assert "script-src 'self'" in headers["content-security-policy"]
    assert b"<noscript>This page shows a run by JavaScript" in body and b"allow JavaScript" in body


def test_the_first_address_is_that_of_the_curves(ask):
    status, headers, _ = ask("/")
    assert status == 307 and headers["location"] == "/curves"


def test_runs_are_described(ask):
    one, two = ask.json("/data/runs")
    assert (one["name"], one["step"], one["max_steps"], one["state"]) == ("one", 12, 12, "finished")
    assert (two["state"], two["left_s"]) == ("running", 45 * 0.5)
    assert one["last"]["reward/mean"] == 1.2 and one["traced"] == [1, 10] and one["problems"] == []


def test_a_run_that_goes_on_and_one_that_has_died_are_told_apart(tmp_path):
    path = made(tmp_path / "run", steps=3, max_steps=9)
    file, owner = path / lock.NAME, lock.Owner.me()
    told = lambda: tuple(RunFiles(str(path)).describe()[name] for name in ("state", "note"))  # noqa: E731
    assert told() == ("running", "")
    os.utime(path / "metrics.jsonl", (1, 1))
    os.utime(file, (1, 1))
    assert told()[0] == "running" and re.fullmatch(r"No record for \d+ days\.", told()[1])
    file.write_text(dataclasses.replace(owner, born="0").text())
    assert told() == ("died", f"Its process is gone ({owner.shown}): the same command resumes it.")
    file.write_text(dataclasses.replace(owner, machine="another").text())
    assert told() == ("running", ""), "the lease of another machine was renewed just now"
    os.utime(file, (1, 1))
    state, note = told()
    assert state == "silent" and note.endswith(f" from {owner.shown}: check on that machine whether it still runs.")
    with (path / "metrics.jsonl").open("a") as lines:
        lines.writelines(json.dumps({"step": step, "time/step": 1e9}) + "\n" for step in range(4, 9))
    os.utime(path / "metrics.jsonl", (1, 1))
    assert told() == ("running", ""), "its steps take longer than this"
    file.unlink()
    assert told()[0] == "stopped" and "the same command resumes it" in told()[1]


def test_metrics_are_given_by_name_and_thinned(ask):
    found = ask.json("/data/metrics?run=0&name=reward/mean&name=eval/greedy_answer&name=none")
    assert found["reward/mean"] == [list(range(1, 13)), [step / 10 for step in range(1, 13)]]
    assert found["eval/greedy_answer"] == [[0, 12], [0.25, 0.5]] and found["none"] == [[], []]
    thin = ask.json("/data/metrics?run=0&name=odd&points=10")["odd"]
    assert len(thin[0]) <= 10 and 9.0 in thin[1], "thinning must keep outliers"
    status, headers, body = ask("/data/metrics.csv?name=reward/mean")
    assert status == 200 and headers["content-disposition"].startswith("attachment")
    head, first, *rest = body.decode().splitlines()
    assert (head, first) == ("run,metric,step,value", "one,reward/mean,1,0.1") and {row[:4] for row in rest} == {
        "one,",
        "two,",
    }


def test_a_group_holds_every_number_of_every_token(ask):
    group = ask.json("/data/group?run=0&step=10&group=1")
    assert (group["groups"], len(group["samples"]), group["reward_names"]) == (2, 2, ["a", "b", "c"])
    sample = group["samples"][0]
    length = sample["length"]
    assert len(sample["text"]) == length and all(len(values) == length for values in sample["tokens"].values())
    assert {"logprob", "trainer_logprob", "entropy", "advantage", "version", "mask", "trained"} <= set(sample["tokens"])
    telling = ask.json("/data/group?run=0&step=10&group=-1")["group"]
    assert telling == int(np.argmax([np.ptp(RunFiles_rewards(ask, g)) for g in range(2)]))


def RunFiles_rewards(ask, group):  # noqa: N802
    return [sample["reward"] for sample in ask.json(f"/data/group?run=0&step=10&group={group}")["samples"]]


def test_samples_are_searched_filtered_and_sorted(ask):
    every = ask.json("/data/samples?run=0")
    assert all(set(row["rewards"]) == {"a", "b", "c"} and "truth" in row for row in every["rows"])
    assert every["count"] == 8 and {row["step"] for row in every["rows"]} == {1, 10}
    rewards = [row["reward"] for row in ask.json("/data/samples?run=0&sort=reward")["rows"]]
    assert rewards == sorted(rewards)
    assert ask.json("/data/samples?run=0&step=10")["count"] == 4
    assert ask.json("/data/samples?run=0&q=%3Cscript")["count"] == 2
    assert ask.json("/data/samples?run=0&stop=length")["count"] == 2
    low = sorted(rewards)[4]
    assert ask.json(f"/data/samples?run=0&low={low}")["count"] == 4
    assert ask.json("/data/samples?run=0&failed=1")["count"] == 0


def test_the_timeline_marks_what_a_step_waited_for(ask):
    found = ask.json("/data/timeline?run=0&first=3&last=3")
    assert {span["name"] for span in found["spans"]} == {"rollout", "update", "score"}
    path = [(part["lane"], part["name"], part["s"]) for part in found["paths"]["3"]]
    assert path == [
        ("rollout", "rollout", pytest.approx(0.2)),
        ("trainer", "score", pytest.approx(0.05)),
        ("loop", "update", pytest.approx(0.25)),
    ]
    typical = ask.json("/data/timeline?run=0")
    assert (typical["first"], typical["last"], typical["steps"]) == (12, 12, [1, 12])
    firsts = [ask.json(f"/data/timeline?run=0&last=9&seconds={s}")["first"] for s in (0, 1, 3600)]
    assert firsts == [9, 8, 1]  # a step takes half a second


@pytest.mark.parametrize(
    ("seconds", "step"),
    [([30, 1, 1, 9, 1, 1.5], 5), ([30], 1), ([30, 9], 2), ([9, 2, 1, 3], 2), ([5, 1, 1, 1, 1], 5)],
)
def test_the_timeline_opens_on_a_typical_step(seconds, step):
    """A typical step is neither the first, which compiles, nor a step with an evaluation."""
    begins = itertools.accumulate(seconds, initial=0.0)
    spans = [{"step": i + 1, "start": begin, "s": s} for i, (begin, s) in enumerate(zip(begins, seconds, strict=False))]
    assert typical_step(spans) == step


def test_calls_of_tools_have_a_lane_and_the_plan_is_beside_the_measured(tmp_path, capsys):
    run = with_tools(tmp_path / "run")
    ask = Client(application([RunFiles(str(run))]))
    found = ask.json("/data/timeline?run=0&first=3&last=3")
    calls = [span for span in found["spans"] if span["lane"] == "tools"]
    assert [span["row"] for span in calls] == [0, 1, 2, 3, 0, 1] and calls[2]["failed"] == "deadline"
    assert found["left_out"] == 3 and not any(part["lane"] == "tools" for part in found["paths"]["3"])
    assert ask.json("/data/config?run=0")["plan"] == [
        {"name": "step", "unit": "s", "planned": 0.25, "measured": 0.5, "how": "predicted", "ratio": 2.0},
        {"name": "rollout", "unit": "s", "planned": 0.1, "measured": None, "how": "predicted", "ratio": None},
        {"name": "score and update", "unit": "s", "planned": 0.1, "measured": None, "how": "predicted", "ratio": None},
        {
            "name": "memory, fullest device",
            "unit": "GiB",
            "planned": 3.0,
            "measured": None,
            "how": "counted",
            "ratio": None,
        },
    ]
    for broken in ("{", "[]", '{"step": 3, "programs": {}}', '{"step": {"step_s": "x"}, "programs": [3]}'):
        (run / "plan.json").write_text(broken)
        found = ask.json("/data/config?run=0")
        assert found["plan"] == [] and found["planned_for"] == ""


def test_a_critical_path_crosses_hosts_and_gaps():
    def span(name, host, start, s, lane="loop"):
        return {"step": 1, "host": host, "lane": lane, "name": name, "start": start, "s": s}

    path = critical_path(
        [
            span("rollout", "rollout 0", 0.0, 1.0, "rollout"),
            span("rollout", "rollout 1", 0.0, 2.0, "rollout"),
            span("rollout", "trainer 0", 0.0, 2.0),
            span("waiting for trainer 0", "rollout 0", 1.0, 3.0),
            span("update", "trainer 0", 2.5, 1.5),
        ]
    )
    assert [(part["host"], part["start"], part["s"]) for part in path] == [
        ("rollout 1", 0.0, 2.0),
        ("trainer 0", 2.5, 1.5),
    ]
    assert critical_path([]) == []


def test_the_configuration_is_shown(ask):
    found = ask.json("/data/config?run=0")
    assert found["config"]["trainer"]["max_steps"] == 12 and "sha256" not in found["config"]
    assert (
        found["about"]["tables"][0]["title"] == "Roles (8 x cpu)" and found["defaults"]["trainer"]["max_steps"] is None
    )


def test_what_the_doctor_finds_is_told_and_looked_for_again_after_a_step(tmp_path):
    path = made(tmp_path / "run", steps=5, max_steps=50, trace="off")
    ask = Client(application([RunFiles(str(path))]))
    assert ask.json("/data/findings?run=0") == {"found": [], "problem": ""}
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 6, "actor/nonfinite": 1.0, "time/step": 0.5}) + "\n")
    (found,) = ask.json("/data/findings?run=0")["found"]
    assert (found["step"], found["name"]) == (6, "gradient not finite") and found["meaning"] and found["key"]
    told = json.loads(re.findall(r'id="data">(.*?)</script>', report([RunFiles(str(path))]), re.DOTALL)[0])
    assert told[0]["findings"]["found"] == [found]


def test_every_metric_of_the_page_of_metrics_has_its_unit():
    page = (pathlib.Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    listed = dict(re.findall(r"^- `([^`]+)` \(([^)]*)\)", page, re.MULTILINE))
    # docs/metrics.md describes these names' units in words, such as "as the mean"; unit() returns '' for them.
    others = {"env/NAME", "kto/loss", "eval/error/NAME", "eval/SET/NAME"}
    assert {name: unit(name) for name in listed} == {n: "" if n in others else of for n, of in listed.items()}
    assert unit("eval/hard/greedy_answer") == unit("eval/hard/sampled_majority") == "share of 1"
    assert unit("eval/hard/records") == "count" and unit("odd") == ""


@pytest.mark.parametrize(
    "path",
    [
        "/data/group?run=7&step=1",
        "/data/group?run=-1&step=1",
        "/data/group?run=0&step=3&group=0",
        "/data/group?run=0&step=10&group=99",
        "/data/group?run=x",
        "/data/timeline?run=0&first=9999999999999999999",
        "/data/samples?run=0&low=abc",
        "/data/samples?run=0&sort=nothing;drop&offset=x",
    ],
)
def test_what_cannot_be_answered_is_told_in_a_sentence(ask, path):
    status, _, body = ask(path)
    assert status == 400 and len(json.loads(body)["error"]) > 10


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "/static/../server.py",
        "/static/%2e%2e/server.py",
        "/data/runs/../config",
        "/config.json",
        "/static/",
    ],
)
def test_nothing_else_is_served(ask, path):
    assert ask(path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_there_is_no_route_that_writes(ask, method):
    for path in ("/", "/curves", "/data/runs", "/data/metrics.csv", "/static/core.js"):
        assert ask(path, method)[0] == 405


def test_another_name_of_the_host_is_refused(runs):
    """The server refuses unknown host names: another site could point its own name at this machine (DNS rebinding)."""
    app = application([RunFiles(str(runs / "one"))], hosts=["127.0.0.1"])
    assert Client(app, "evil.example")("/data/runs")[0] == 400
    assert Client(app, "127.0.0.1:8777")("/data/runs")[0] == 200


def test_a_token_is_asked_for_and_kept_in_a_cookie(runs):
    ask = Client(application([RunFiles(str(runs / "one"))], token="secret", hosts=["*"]))
    assert [ask(path)[0] for path in ("/curves", "/data/runs", "/static/core.js", "/data/runs?token=wrong")] == [
        403
    ] * 4
    status, headers, _ = ask("/curves?token=secret")
    assert status == 200 and "HttpOnly" in headers["set-cookie"] and "SameSite=Strict" in headers["set-cookie"]
    assert ask("/data/runs", cookie="podrl_view=secret")[0] == 200
    assert ask("/data/runs", cookie="podrl_view=other")[0] == 403


def test_a_run_that_grows_is_followed_and_one_that_is_resumed_read_anew(tmp_path):
    run = RunFiles(str(made(tmp_path / "run", steps=3, max_steps=9)))
    path = tmp_path / "run" / "metrics.jsonl"
    assert run.describe()["step"] == 3
    with path.open("a") as file:
        file.write('{"step": 4, "reward/mean": 7.0}\n{"step": 5, "rew')
    assert run.describe()["step"] == 4 and run.problems() == [], "a line that is being written is not damage"
    with path.open("a") as file:
        file.write('ard/mean": 8.0}\n')
    assert run.describe()["last"]["reward/mean"] == 8.0
    path.write_text('{"step": 1, "reward/mean": 0.5}\n')
    assert run.describe()["step"] == 1 and run.series.columns["reward/mean"] == ([1], [0.5])


def test_a_damaged_run_shows_what_is_whole(tmp_path):
    run = RunFiles(str(damaged(tmp_path / "run")))
    ask = Client(application([run]))
    (found,) = ask.json("/data/runs")
    assert found["step"] == 12 and len(found["problems"]) == 2
    assert ask.json("/data/metrics?run=0&name=reward/mean")["reward/mean"][0] == [1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    assert "cannot be read" in ask.json("/data/findings?run=0")["problem"]
    assert ask("/data/group?run=0&step=10&group=0")[0] == 400 and ask.json("/data/group?run=0&step=1&group=0")
    assert any("cannot be read" in row.get("problem", "") for row in ask.json("/data/samples?run=0")["rows"])
    assert ask.json("/data/timeline?run=0")["spans"] and ask.json("/data/config?run=0")["config"] == {}
    assert "cannot be read" in report([run])


def test_a_run_without_a_trace_shows_its_samples(tmp_path):
    run = RunFiles(str(made(tmp_path / "run", steps=3, trace="off")))
    assert run.traced() == [] and run.timeline(None, None)["spans"] == []
    rows = run.samples({})["rows"]
    assert rows[0]["completion"] == HOSTILE and rows[0]["reward"] == 1.0
    assert rows[0]["truth"] == "0" and rows[0]["rewards"] == {"exact": 1.0}
    with (tmp_path / "run" / "samples.jsonl").open("w") as file:
        file.writelines(json.dumps({"step": i, "prompt": "p", "completion": "c"}) + "\n" for i in range(250))
    for offset, first, count in (("", 249, 100), ("200", 49, 50), ("250", 49, 50), ("9999", 49, 50), ("-3", 249, 100)):
        found = RunFiles(str(tmp_path / "run")).samples({"offset": offset})
        assert (found["count"], found["rows"][0]["step"], len(found["rows"])) == (250, first, count), offset


def test_the_report_needs_nothing_and_holds_samples_as_data(runs, tmp_path):
    out = tmp_path / "report.html"
    assert main(["podrl.view", str(runs / "one"), str(runs / "two"), f"--html={out}"]) == 0
    page = out.read_text()
    assert not re.search(r'(?:src|href)="', page), "the report loads no other file"
    assert "<noscript>" in page and "python -m podrl.doctor RUN" in page
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    one, two = json.loads(data)
    assert one["groups"] and HOSTILE in json.dumps(one["groups"], ensure_ascii=False).encode().decode("unicode_escape")
    assert two["run"]["name"] == "two" and HOSTILE not in page
    assert len(re.findall(r"'sha256-", page)) == page.count("<script>") + 1


def test_samples_of_lowest_reward_are_listed_with_what_each_function_gave(runs, capsys):
    assert main(["podrl.view", str(runs / "one"), "--samples=2"]) == 0
    text = capsys.readouterr().out
    rows = RunFiles(str(runs / "one")).found({"sort": "reward"})
    assert text.startswith(f"one: {len(rows)} samples of 2 steps, 1 to 10.\n") and "\x1b" not in text
    given = [row["rewards"]["b"] for row in rows]
    assert f"b: mean {sum(given) / len(given):.3g}, 0 or less for {sum(g <= 0 for g in given)} of {len(given)}" in text
    assert "Endings: " in text and f"length {sum(row['stop'] == 'length' for row in rows)}" in text
    shown = re.findall(r"^step (\d+), group (\d+), sample (\d+), reward (\S+) \(a ", text, re.MULTILINE)
    assert [float(reward) for *_, reward in shown] == [float(f"{row['reward']:.3g}") for row in rows[:2]]
    assert repr(rows[0]["completion"]) in text and f"after {rows[0]['length']} tokens" in text


def test_listed_samples_cannot_steer_the_terminal_and_need_no_trace(tmp_path, capsys):
    made(tmp_path / "plain", steps=1, trace="off")
    with open(tmp_path / "plain" / "samples.jsonl", "a") as file:
        file.write(json.dumps({"step": 1, "prompt": "p", "completion": "\x1b[2J", "reward": 0.5}) + "\n")
    assert main(["podrl.view", str(tmp_path / "plain"), "--samples=1"]) == 0
    text = capsys.readouterr().out
    assert "plain: 2 samples of step 1." in text and "step 1, reward 0.5\n" in text
    assert "\\x1b[2J" in text and "\x1b" not in text
    assert main(["podrl.view", str(tmp_path / "plain"), "--samples=0"]) == 1
    assert "--samples=0 must be 1 or more" in capsys.readouterr().err
    (tmp_path / "plain" / "samples.jsonl").unlink()
    assert main(["podrl.view", str(tmp_path / "plain"), "--samples=1"]) == 1
    assert "log.trace" in capsys.readouterr().err


def test_spans_are_exported_for_perfetto(runs, tmp_path):
    out = tmp_path / "trace.json"
    assert main(["podrl.view", str(runs / "one"), f"--chrome={out}"]) == 0
    events = json.loads(out.read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 4 * 12


def test_a_directory_that_is_no_run_is_refused(tmp_path, capsys):
    assert main(["podrl.view", str(tmp_path)]) == 1
    assert "neither config.json nor metrics.jsonl" in capsys.readouterr().err


def test_the_extra_is_named_where_it_is_missing(runs, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["podrl.view", str(runs / "one")]) == 1
    assert "[view]'" in capsys.readouterr().err


def test_the_plotting_library_comes_with_its_licence():
    static = pathlib.Path(importlib.util.find_spec("podrl.view").submodule_search_locations[0]) / "static"
    assert "MIT" in (static / "uplot.LICENSE").read_text() and (static / "uplot.js").stat().st_size > 40_000
    assert LogConfig().trace == "sampled"


def test_a_run_in_a_bucket_is_read_as_one_on_a_disk(runs, ask, bucket):
    for path in filter(pathlib.Path.is_file, (runs / "one").rglob("*")):
        bucket.put(f"runs/seen/{path.relative_to(runs / 'one')}", path.read_bytes())
    place = "gs://bucket/runs/seen"
    there = Client(application([RunFiles(place)]))
    for asked in ("metrics?name=reward/mean", "timeline?first=3&last=4", "group?step=10", "samples?step=10", "config?"):
        found, same = (each.json(f"/data/{asked}&run=0") for each in (there, ask))
        assert found and found == same, asked
    assert len(there.json("/data/metrics?name=reward/mean&run=0")["reward/mean"]) > 0
    assert [str(each) for each in doctor.examine(place)] == [str(each) for each in doctor.examine(str(runs / "one"))]
