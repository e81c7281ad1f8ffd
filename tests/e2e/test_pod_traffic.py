"""Messages between the hosts of a pod: every trainer host receives only samples its own devices train on."""

import collections
import json
import os
import pathlib
import signal

import pytest
from processes import job, run, same_end
from test_pods import process

from podrl.launch import find_config
from podrl.storage.storage import complete_steps

pytestmark = pytest.mark.e2e

FOUR = ("--local_processes=4", "--fake_devices=1", "--config=noted.py", "--config.log.samples_every=1")
FOUR += ("--config.log.trace=off",)  # trainer 0 receives traced batches whole
STALE = ("--config.grpo.max_staleness=1",)

# The configuration grpo_gemma.py, with which every process also writes down each answer that it gets from another
# process.
_NOTED = """
import json
import os
import runpy

from podrl.runtime import joining
from podrl.runtime.message import encode

join = joining.join


def noted(ask, name):
    def asked(process, key, *args, **more):
        message = ask(process, key, *args, **more)
        note = {
            "key": key.partition("/")[0],
            "bytes": sum(len(frame) for frame in encode(message)),
            "tokens": int(message.arrays["length_B"].sum()) if "length_B" in message.arrays else 0,
            "sizes": {field: int(array.size) for field, array in message.arrays.items()},
        }
        if key == "rows":
            note["step"] = int(args[0].value["task"].partition("/")[2])
        elif steps := [int(part) for part in key.split("/") if part.isdigit()]:
            note["step"] = steps[0]
        with open(f"traffic{os.environ['PODRL_PROCESS_INDEX']}.jsonl", "a") as out:
            out.write(json.dumps(note) + "\\n")
        return message

    return asked


def join_and_note(*args, **settings):
    pod = join(*args, **settings)
    pod.get, pod.call = noted(pod.get, "get"), noted(pod.call, "call")
    return pod


joining.join = join_and_note
get_config = runpy.run_path(BASE)["get_config"]
"""


def _folder(path: pathlib.Path) -> pathlib.Path:
    (path / "noted.py").write_text(f"BASE = {find_config('grpo_gemma.py')!r}\n{_NOTED}")
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[pathlib.Path]:
    """Runs the pod without and with staleness; returns the run directories."""
    options = ((), STALE)
    return [run(_folder(tmp_path_factory.mktemp("noted")) / "run", *FOUR, *more).workdir for more in options]


def _notes(directory: pathlib.Path, host: int) -> dict[tuple[str, int], list[dict]]:
    """Lists the answers that a host received from other hosts, by kind and step."""
    notes = collections.defaultdict(list)
    for line in (directory / f"traffic{host}.jsonl").read_text().splitlines():
        note = json.loads(line)
        notes[note["key"], note.get("step", -1)].append(note)
    return notes


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_trainer_host_receives_the_samples_it_trains_on_and_no_others(staleness, runs):
    """A batch that is in flight at a checkpoint is the exception: the first host alone fetches all of its samples."""
    workdir = runs[staleness]
    received = [_notes(workdir.parent, host) for host in (0, 1)]
    steps_completed, bytes_ = 0, [0, 0]
    for step in range(6):
        kinds = [("whole", step), ("header", step)]
        known = [sum(note["tokens"] for kind in kinds for note in notes.get(kind, ())) for notes in received]
        assert known[0] == known[1] > 0  # both hosts know the lengths of all samples
        tokens = known[0]
        sizes = [[note["sizes"] for note in notes["rows", step]] for notes in received]
        mine = [sum(size["tokens_BT"] for size in host) for host in sizes]
        assert all(set(size) == {"tokens_BT", "logprob_BT"} for size in sizes[1])
        assert 0.25 * tokens <= mine[1] <= 0.75 * tokens, (step, mine, tokens)
        if any(len(size) > 2 for size in sizes[0]):
            steps_completed += 1
            assert mine[0] == tokens
            continue
        assert mine[0] == tokens - mine[1], (step, mine, tokens)
        assert received[0]["whole", step] and ("whole", step) not in received[1]  # trainer 0 writes samples.jsonl
        bytes_ = [
            total + sum(n["bytes"] for n in notes["rows", step]) for total, notes in zip(bytes_, received, strict=True)
        ]
    assert steps_completed == (2 if staleness else 0)  # the batches in flight at the checkpoints of steps 2 and 4
    assert max(bytes_) < 0.65 * sum(bytes_)
    assert not any(notes for (key, _), notes in received[1].items() if key in ("whole", "scores"))
    # Rollout hosts learn which step starts or comes next, and when an evaluation begins and ends; they never receive
    # samples.
    for host in (2, 3):
        notes = _notes(workdir.parent, host)
        assert {key for key, _ in notes} <= {
            "settings",
            "alike",
            "enter",
            "start",
            "word",
            "over",
            "reached",
            "evaluated",
        }
        assert not any(note["tokens"] for kind in notes.values() for note in kind)


@pytest.mark.nightly("podrl/learner/experience.py")  # test_kills.py kills a split pod at every change
def test_a_pod_that_is_killed_with_a_batch_in_flight_ends_as_one_that_never_was(runs, tmp_path):
    _folder(tmp_path)
    with job(tmp_path / "killed", *FOUR, *STALE) as running:
        running.wait_for_step(3)
        running.wait_for("a checkpoint", lambda: complete_steps(running.workdir / "checkpoints"))  # a thread saves
        os.kill(process(running.process.pid, 1), signal.SIGKILL)
        assert running.end() == 42, running.stderr
    again = run(tmp_path / "killed", *FOUR, *STALE)
    assert any(f"Resumed after step {step}" in again.stdout for step in (2, 4))
    same_end(again.workdir, runs[1])
