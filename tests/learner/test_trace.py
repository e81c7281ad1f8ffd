"""The trace of a run: every token of a step's samples, and the spans of each process, written once and bounded."""

import io
import json
import threading
import time
import zipfile

import numpy as np
import pytest
from test_experience import _experience

from podrl.rundir import spans, trace
from podrl.rundir.metrics import LogConfig
from podrl.rundir.spans import Spans, chrome_trace
from podrl.rundir.tracing import Pieces, TraceSteps, Tracing


class Words:
    """A tokenizer in which token i is ' wi', and 0 is a special token, which decoding leaves out."""

    def encode(self, text):
        return [1]

    def decode(self, ids):
        return "".join(f" w{i}" for i in ids if i).lstrip()

    def token_text(self, token):
        return "<pad>" if token == 0 else f"▁w{token}"


def extras(experience, rows=2):
    value_BT = np.arange(experience.rollouts.tokens_BT.size, dtype=np.float32).reshape(4, 8)
    columns = {"advantage": value_BT, "trained": experience.rollouts.mask_BT}
    scores = {"trainer_logprob": np.full((rows, 8), -0.5, np.float32), "entropy": np.full((rows, 8), 1.5, np.float32)}
    return trace.TraceExtras(["a", "b", "c"], columns, lambda: scores)


def tracing(path, start=0, **settings):
    return Tracing(path, LogConfig(to=(), **settings), start=start)


def recorded(path, steps, start=0, seed=0, **settings):
    """Records steps as a run does; returns the experience, which is the same in all steps."""
    experience, made = _experience(seed), tracing(path, start, **settings)
    for step in steps:
        span = {"step": step, "host": "trainer 0", "lane": "loop", "name": "update", "start": 1.0 * step, "s": 0.5}
        if TraceSteps(LogConfig(**settings)).wants(step):
            made.note(step, extras(experience))
        made.record(step, experience, [span], Words())
    made.close()
    return experience


def test_a_step_is_read_back_as_it_was(tmp_path):
    rollouts = recorded(tmp_path, [10]).rollouts
    read = trace.read_step(str(tmp_path), 10)
    keep_BT = np.arange(8) < rollouts.length_B[:, None]
    for name in ("tokens", "mask", "logprob", "raw_logprob", "kept", "version", "turn_reward"):
        np.testing.assert_array_equal(read.tokens[name], getattr(rollouts, f"{name}_BT")[keep_BT])
    assert read.tokens["advantage"].tolist() == np.arange(32.0).reshape(4, 8)[keep_BT].tolist()
    scored_BT = (rollouts.mask_BT > 0) & (np.arange(4) < 2)[:, None]
    np.testing.assert_array_equal(read.tokens["trainer_logprob"], np.where(scored_BT, -0.5, np.nan)[keep_BT])
    np.testing.assert_array_equal(read.tokens["entropy"], np.where(scored_BT, 1.5, np.nan)[keep_BT])
    assert read.samples["length"].tolist() == rollouts.length_B.tolist() and read.first.tolist() == [0, 8, 15, 21]
    assert read.samples["prompt_length"].tolist() == [3, 3, 5, 5] and read.samples["rewards"].shape == (3, 4)
    assert (read.step, read.samples["group"].tolist(), list(read.reward_names)) == (10, [0, 0, 1, 1], ["a", "b", "c"])
    assert read.prompts == ["a é", "b"] and read.fields["answer"] == ["1", "2"] and read.completions[1] == "y"
    assert read.episodes[0]["turns"][0]["text"] == "é"
    assert read.pieces[3] == " w3" and read.pieces.get(0, "<pad>") == "<pad>"


def test_pieces_keep_their_space_and_special_tokens_their_name():
    piece = Pieces(Words())
    assert [piece(2), piece(0)] == [" w2", "<pad>"]


def rewritten(path, change):
    """Changes the header and the arrays of the recorded step 10 with the function `change`."""
    file = path / trace.FOLDER / trace.file_name(10)
    with np.load(file) as found:
        arrays = dict(found)
    header = json.loads(arrays["header"].tobytes())
    change(header, arrays)
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    with file.open("wb") as out:
        np.savez(out, **arrays)


def test_a_file_of_format_1_has_groups_of_one_size(tmp_path):
    recorded(tmp_path, [10])
    before = trace.read_step(tmp_path, 10)

    def older(header, arrays):
        header |= {"format": 1, "group_size": 2}
        del arrays["sample.group"]

    rewritten(tmp_path, older)
    read = trace.read_step(tmp_path, 10)
    assert read.samples["group"].tolist() == before.samples["group"].tolist() == [0, 0, 1, 1]


def test_a_sample_without_its_prompt_is_damage(tmp_path):
    recorded(tmp_path, [10])
    rewritten(tmp_path, lambda header, arrays: arrays.update({"sample.group": np.array([0, 0, 1, 2])}))
    with pytest.raises(
        ValueError, match=r"cannot be read \(ValueError: some samples name a prompt that it does not hold\)"
    ):
        trace.read_step(tmp_path, 10)


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"samples_every": 3}, [1, 3, 6]),
        ({"samples_every": 0}, []),
        ({"trace": "all", "samples_every": 0}, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_the_sampled_steps_are_those_of_samples_jsonl(tmp_path, settings, steps):
    recorded(tmp_path, range(1, 7), **settings)
    assert trace.traced_steps(tmp_path) == steps
    assert [json.loads(line)["step"] for line in (tmp_path / spans.NAME).read_text().splitlines()] == [1, 2, 3, 4, 5, 6]


def test_a_resumed_run_records_each_step_once(tmp_path):
    recorded(tmp_path, range(1, 6), trace="all")
    recorded(tmp_path, [4], start=4, seed=1, trace="all")
    assert trace.traced_steps(tmp_path) == [1, 2, 3, 4], (
        "step 5 is not in the trace, because the resumed run did not reach it"
    )
    again = _experience(1).rollouts
    keep_BT = np.arange(8) < again.length_B[:, None]
    np.testing.assert_array_equal(trace.read_step(tmp_path, 4).tokens["logprob"], again.logprob_BT[keep_BT])
    assert [json.loads(line)["step"] for line in (tmp_path / spans.NAME).read_text().splitlines()] == [1, 2, 3, 4]


def test_the_oldest_steps_make_room(tmp_path):
    recorded(tmp_path, [1], trace="all")
    size = (tmp_path / trace.FOLDER / trace.file_name(1)).stat().st_size
    made = tracing(tmp_path, 2, trace="all", trace_mb=1)
    assert made._bound == 1 << 20
    made._bound = int(2.5 * size)
    for step in range(2, 6):
        made.note(step, extras(_experience(0)))
        made.record(step, _experience(0), [], Words())
    made.close()
    assert trace.traced_steps(tmp_path) == [4, 5]


def test_old_spans_make_room(tmp_path, monkeypatch):
    monkeypatch.setattr("podrl.rundir.tracing.SPAN_BYTES", 2000)
    recorded(tmp_path, range(1, 101), samples_every=0)
    steps = [json.loads(line)["step"] for line in (tmp_path / spans.NAME).read_text().splitlines()]
    assert steps == list(range(steps[0], 101)) and 5 < len(steps) < 25


def test_a_slow_disk_loses_records_and_no_time(tmp_path, monkeypatch, caplog):
    free, entered = threading.Event(), threading.Event()

    def slow(*args):
        entered.set()
        assert free.wait(60)
        return b""

    monkeypatch.setattr(trace, "content", slow)
    made, experience = tracing(tmp_path, trace="all"), _experience(0)
    for step in range(1, 40):
        made.note(step, extras(experience))
        made.record(step, experience, [], Words())
        assert entered.wait(60)
    free.set()
    made.close()
    assert len(trace.traced_steps(tmp_path)) == 8
    assert "The trace lacks 31 steps" in caplog.text


def test_a_full_disk_is_said_once_and_ends_nothing(tmp_path, monkeypatch, caplog):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("podrl.rundir.tracing.write_whole", full)
    recorded(tmp_path, range(1, 4), trace="all")
    assert trace.traced_steps(tmp_path) == [] and caplog.text.count("No space left") >= 1


def _damaged(packed):
    cut = packed[: len(packed) // 2]
    return {"cut": cut, "empty": b"", "no archive": b"x" * 99, "pickle": _pickled(), "block": _no_block(packed)}


def _no_block(packed):
    """Gives the first compressed block of the first array a block type that does not exist."""
    with zipfile.ZipFile(io.BytesIO(packed)) as file:
        at = file.infolist()[0].header_offset
    lengths = int.from_bytes(packed[at + 26 : at + 28], "little"), int.from_bytes(packed[at + 28 : at + 30], "little")
    at += 30 + sum(lengths)
    return packed[:at] + b"\x07" + packed[at + 1 :]


def _pickled():
    out = io.BytesIO()
    np.savez(out, header=np.array([{"a": 1}], dtype=object))
    return out.getvalue()


@pytest.mark.parametrize("kind", ["cut", "empty", "no archive", "pickle", "block"])
def test_a_damaged_file_is_refused_with_its_name(tmp_path, kind):
    recorded(tmp_path, [1])
    path = tmp_path / trace.FOLDER / trace.file_name(1)
    path.write_bytes(_damaged(path.read_bytes())[kind])
    with pytest.raises(ValueError, match=r"step_00000001\.npz cannot be read"):
        trace.read_step(tmp_path, 1)


def test_columns_that_do_not_belong_together_are_refused(tmp_path):
    recorded(tmp_path, [1])
    path = tmp_path / trace.FOLDER / trace.file_name(1)
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    np.savez(path, **(arrays | {"token.logprob": arrays["token.logprob"][:-1]}))
    with pytest.raises(ValueError, match="do not belong together"):
        trace.read_step(tmp_path, 1)


def test_a_missing_step_says_which_there_are(tmp_path):
    recorded(tmp_path, [1, 2, 3], trace="all")
    with pytest.raises(ValueError, match=r"only some steps .*, from 1 to 3"):
        trace.read_step(tmp_path, 7)
    with pytest.raises(ValueError, match=r"log\.trace"):
        trace.read_step(tmp_path / "other", 1)


def test_spans_know_their_step_host_and_lane():
    found = Spans("rollout 1")
    now = time.monotonic()
    found.add("waiting for trainer 0 at step 7", now - 1, now)
    found.add("rollout", now - 1, now, lane="rollout", step=9)
    first, second = found.take(8)
    assert (first["name"], first["step"], first["host"], first["lane"]) == (
        "waiting for trainer 0",
        8,
        "rollout 1",
        "loop",
    )
    assert second["step"] == 9 and first["s"] == pytest.approx(1.0) and abs(first["start"] + 1 - time.time()) < 60
    assert found.take(9) == []


def test_spans_of_other_processes_are_sent_every_few_steps():
    found, sent = Spans("rollout 0"), []
    found.send = sent.append
    for step in range(1, 13):
        found.add("publish", 0.0, 1.0)
        found.pass_on(step)
    assert [[span["step"] for span in each] for each in sent] == [[1], [2, 3, 4, 5], [6, 7, 8, 9, 10]]
    found.pass_on(13, last=True)
    assert [span["step"] for span in sent[-1]] == [11, 12]


def test_calls_of_tools_are_bounded_and_the_longest_stay():
    found = Spans("rollout 1")
    for i in range(spans.CALLS + 50):
        found.add_call("search", 10.0, 10.0 + (i * 7919 % 250) / 1000, step=3, failed="deadline" if i == 7 else "")
    found.add("update", 0.0, 1.0)
    taken = found.take(2)
    calls = [span for span in taken if span["lane"] == spans.TOOLS]
    assert len(calls) == spans.CALLS and {(span["host"], span["step"]) for span in calls} == {("rollout 1", 3)}
    assert sorted(round(1000 * span["s"]) for span in calls) == list(range(50, 250)), (
        "only the shortest calls are left out"
    )
    assert [span["failed"] for span in calls if "failed" in span] == ["deadline"]
    assert sum(span.get("left_out", 0) for span in calls) == 50 and taken[0]["name"] == "update"
    assert found.take(3) == []


def test_calls_that_overlap_have_rows_of_their_own():
    def called(host, start, s, **more):
        return {"step": 1, "host": host, "lane": "tools", "name": "search", "start": start, "s": s} | more

    given = [called("a", 0.0, 5.0), called("a", 1.0, 1.0, failed="died"), called("b", 1.0, 1.0), called("a", 2.0, 9.0)]
    given.append(called("a", 3.0, 1.0))
    given.append(called("a", 0.0, 9.0) | {"lane": "loop"})
    assert spans.rows(given) == [0, 1, 0, 1, 2, 0]
    events = chrome_trace(given)["traceEvents"]
    lanes = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert lanes == ["tools", "tools 2", "tools", "tools 3", "loop"]
    shown = [e for e in events if e["ph"] == "X"]
    assert shown[1]["args"] == {"step": 1, "failed": "died"} and shown[0]["args"] == {"step": 1}
    assert shown[1]["tid"] == shown[3]["tid"] != shown[0]["tid"]


def test_chrome_trace_has_a_process_per_host_and_a_row_per_lane():
    given = [
        {"step": 1, "host": host, "lane": lane, "name": "n", "start": 2.0, "s": 0.25}
        for host in ("trainer 0", "rollout 0")
        for lane in ("loop", "rollout", "loop")
    ]
    events = chrome_trace(given)["traceEvents"]
    named = [(e["name"], e["pid"], e["args"]["name"]) for e in events if e["ph"] == "M"]
    assert named == [
        ("process_name", 1, "trainer 0"),
        ("thread_name", 1, "loop"),
        ("thread_name", 1, "rollout"),
        ("process_name", 2, "rollout 0"),
        ("thread_name", 2, "loop"),
        ("thread_name", 2, "rollout"),
    ]
    shown = [e for e in events if e["ph"] == "X"]
    assert [e["tid"] for e in shown] == [1, 2, 1, 3, 4, 3]
    assert shown[0] | {"ts": 2_000_000, "dur": 250_000} == shown[0]


def test_compilations_are_spans():
    import jax

    found = Spans()
    with found.compiles():
        jax.jit(lambda x: x * 3 + 41)(np.float32(1)).block_until_ready()
    names = [span["name"] for span in found.take(1)]
    jax.jit(lambda x: x * 3 + 42)(np.float32(1)).block_until_ready()
    assert "compile" in names and found.take(1) == []
