"""The journal of a job of several processes: the leader keeps the records of processes without a run directory."""

import asyncio
import contextlib
import json
import logging
import os
import threading
import time

import pytest
from endpoints import joined
from waits import PATIENCE_S

from podrl.environments.finished_episodes import NUMBER
from podrl.environments.journal import AtLeader, Files, Journal
from podrl.environments.protocol import Task
from podrl.runtime.channel import ChannelError
from podrl.runtime.message import Message
from podrl.runtime.roles import Hosts

TASK = Task("p", step=7, index=2, sample=1)


@pytest.fixture
def pods():
    """A trainer that leads, and two rollout hosts, as endpoints of this process."""
    with joined(Hosts((0,), (1, 2))) as pods:
        yield pods


@pytest.fixture
def files(pods, tmp_path):
    files = Files(tmp_path / "outside")
    files.serve(pods[0].channel)
    yield files
    files.close()


def at(pod):
    return Journal(AtLeader(pod, 30.0))


def find(journal, number, what, task=TASK):
    return asyncio.run(journal.find(task, number, what))


def add(journal, number, what, answer, task=TASK):
    asyncio.run(journal.add(task, number, what, answer))


def test_a_finished_episode_with_its_tokens_is_on_the_disk_and_not_in_memory(pods, files):
    journal = at(pods[1])
    add(journal, 0, "sky", {"text": "blue"})
    for drawn in (["old"], ["new"]):
        add(journal, NUMBER, "program", {"drawn": drawn})
        assert list(files._records["7"]) == list(journal._known["7"]) == [(2, 1, 0)]
    assert find(journal, 0, "sky") == {"text": "blue"} and list(journal._known["7"]) == [(2, 1, 0)]
    assert find(journal, NUMBER, "program") == find(at(pods[2]), NUMBER, "program") == {"drawn": ["new"]}
    add(journal, NUMBER, "program", {"drawn": ["newest"]})
    assert find(journal, NUMBER, "program") == find(at(pods[2]), NUMBER, "program") == {"drawn": ["newest"]}


def test_the_leader_has_an_answer_before_it_is_used(pods, files, tmp_path):
    journal = at(pods[1])
    assert find(journal, 0, "sky") is None
    add(journal, 0, "sky", {"text": "blue"})
    (line,) = (tmp_path / "outside" / "7.jsonl").read_text().splitlines()
    assert json.loads(line)["answer"] == {"text": "blue"}
    assert find(at(pods[2]), 0, "sky") == {"text": "blue"}  # another host, which takes over the sample
    for other in (Task("p", step=8, index=2, sample=1), Task("p", step=7, index=2, sample=1, mode="eval")):
        assert find(at(pods[2]), 0, "sky", other) is None


def test_a_host_that_takes_samples_over_looks_for_their_answers_again(pods, files):
    """A host that takes over samples reads the step's journal again, because the lost host wrote more after the first
    reading."""
    journal, other = at(pods[1]), Task("p", step=7, index=3, sample=0)
    assert find(journal, 0, "sea", other) is None
    add(journal, 0, "sea", {"text": "green"}, other)
    add(at(pods[2]), 0, "sky", {"text": "blue"})
    assert find(journal, 0, "sky") is None
    journal.read_again()
    assert find(journal, 0, "sky") == {"text": "blue"} and find(journal, 0, "sea", other) == {"text": "green"}


def test_samples_that_are_taken_over_together_all_find_their_answers(pods, files):
    """All samples wait for one reading of the store, even if the sample that began the reading is cancelled."""
    journal, other = at(pods[1]), Task("p", step=7, index=3, sample=0)
    assert find(journal, 0, "sky") is None
    for number in range(8):
        add(at(pods[2]), number, "sky", {"text": "blue"})
    reads, read = [], journal._store.read

    async def counted(name):
        reads.append(name)
        return await read(name)

    async def several():
        cancelled = asyncio.create_task(journal.find(other, 0, "sea"))
        while not reads:
            await asyncio.sleep(0)
        found = [asyncio.create_task(journal.find(TASK, number, "sky")) for number in range(8)]
        cancelled.cancel()
        return await asyncio.gather(*found)

    journal._store.read = counted
    journal.read_again()
    assert asyncio.run(several()) == [{"text": "blue"}] * 8 and len(reads) == 2


def test_another_request_is_not_answered_and_warned_of_once(pods, files, caplog):
    for number in range(2):
        add(at(pods[1]), number, "sky", {"text": "blue"})
    journal = at(pods[2])
    with caplog.at_level(logging.WARNING, "podrl.environments"):
        assert [find(journal, number, "sea") for number in range(2)] == [None, None]
    (warning,) = caplog.messages
    assert "asks for 'sea' at step 7, but the journal holds another request" in warning
    add(journal, 0, "sea", {"text": "green"})
    assert find(journal, 0, "sea") == find(at(pods[1]), 0, "sea") == {"text": "green"}


def test_a_record_that_is_sent_twice_is_written_once(pods, files, tmp_path):
    for _ in range(2):
        add(at(pods[1]), 0, "sky", {"text": "blue"})
    assert len((tmp_path / "outside" / "7.jsonl").read_text().splitlines()) == 1


@contextlib.contextmanager
def slow_disk(monkeypatch, seconds=0.05):
    """Makes each sync of a file wait; yields a list to which each sync appends the size of its file."""
    taken, sync = [], os.fsync

    def fsync(file):
        time.sleep(seconds)
        sync(file)
        taken.append(os.fstat(file).st_size)

    with monkeypatch.context() as changed:
        changed.setattr(os, "fsync", fsync)
        yield taken


def test_an_answer_is_on_the_disk_before_it_is_used_and_many_go_there_together(files, monkeypatch, tmp_path):
    async def one(number):
        await files.add("7", {"index": 0, "sample": 0, "n": number, "request": "", "answer": "x" * number})
        return f'"n": {number},' in (tmp_path / "outside" / "7.jsonl").read_text()[: taken[-1]]

    async def several():
        return await asyncio.gather(*(one(number) for number in range(100)))

    with slow_disk(monkeypatch) as taken:
        assert asyncio.run(several()) == [True] * 100
    assert len(taken) <= 4  # syncs for the first record, for the name of its file, and for all other records
    assert len((tmp_path / "outside" / "7.jsonl").read_text().splitlines()) == 100


def test_hosts_wait_for_the_leaders_disk_but_not_for_each_other(pods, files, monkeypatch, tmp_path):
    """Answers of hosts are synced together, and the wait for the disk holds up none of the leader's other services."""
    served, sync, taken = threading.Event(), os.fsync, []

    def fsync(file):
        assert served.wait(PATIENCE_S), "the leader served no request while it waited for the disk"
        sync(file)
        taken.append(file)

    with monkeypatch.context() as changed:
        changed.setattr(os, "fsync", fsync)
        threads = [threading.Thread(target=add, args=(at(pods[1 + n % 2]), n, "sky", {"n": n})) for n in range(8)]
        for thread in threads:
            thread.start()
        time.sleep(0.1)
        pods[0].channel.serve("other", lambda message: message)
        pods[1].call(0, "other", Message(1), PATIENCE_S)
        served.set()
        for thread in threads:
            thread.join()
    assert len(taken) <= 5
    assert len((tmp_path / "outside" / "7.jsonl").read_text().splitlines()) == 8


def test_a_disk_that_fails_is_told_to_whoever_waits(pods, files, monkeypatch):
    def full(file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        asyncio.run(Journal(files).add(TASK, 0, "sky", {"text": "blue"}))
    with pytest.raises(ChannelError, match=r"OSError: .*No space left"):
        add(at(pods[1]), 0, "sky", {"text": "blue"})


def test_records_are_kept_on_the_disk_where_a_run_is_to_be_repeated(files, tmp_path):
    asyncio.run(files.add("7", {"index": 1, "sample": 0, "n": 0, "request": "r", "answer": {"text": "x"}}))
    files.release(before=8)
    assert list(tmp_path.rglob("7.jsonl")) and not files._records
    assert [record["answer"] for record in asyncio.run(files.read("7")).values()] == [{"text": "x"}]


def test_steps_that_a_checkpoint_passed_are_forgotten(pods, files, tmp_path):
    journal = at(pods[1])
    for step in (7, 8):
        add(journal, 0, "sky", {"text": "blue"}, Task("p", step=step, index=2, sample=1))
    files.drop(before=8)
    assert [path.name for path in (tmp_path / "outside").iterdir()] == ["8.jsonl"]
    assert find(journal, 0, "sky") == {"text": "blue"}
    journal.forget(before=8)
    assert find(journal, 0, "sky") is None
