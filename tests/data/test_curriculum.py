"""Curricula: pools by pass rate, shares, retired and postponed prompts, exact resume, weights of sources."""

import json

import numpy as np
import pytest

from podrl.data.config import DataConfig
from podrl.data.pipeline import PromptStream
from podrl.data.pools import (
    EASY,
    HARD,
    NORMAL,
    POSTPONED,
    RETIRED,
    Curriculum,
    CurriculumConfig,
    PassRateTable,
    Results,
)

RATES = (1.0, 0.5, 0.0)  # pass rate of each record, by its number modulo 3


@pytest.fixture
def files(tmp_path):
    for name in "ab":
        rows = [{"question": f"{name} {i}{'?' * (i % 10)}", "answer": "1", "id": i} for i in range(30)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def stream(tokenizer, files, *, rows=6, lag=0, limit=64, sources=(), **curriculum) -> PromptStream:
    where = {"sources": sources} if sources else {"path": str(files / "a.jsonl")}
    data = DataConfig(**where, system_prompt="", eval_fraction=0.0, cache="", curriculum=curriculum)
    made = PromptStream.from_config(data, tokenizer, prompts_per_step=rows, max_prompt_length=limit)
    assert made.curriculum is not None
    made.curriculum.begin(lag=lag, names=["answer"])
    return made


class Training:
    """Stands in for the training loop: draws batches `lag` steps ahead, and reports the pass rates RATES to the
    curriculum."""

    def __init__(self, made: PromptStream, lag: int = 0):
        self.stream, self.lag = made, lag
        self.step, self.open, self.history = 0, [], []

    def run(self, steps: int) -> list[list[int]]:
        for _ in range(steps):
            while len(self.open) <= self.lag:
                batch = next(self.stream)
                self.open.append((batch.fields["id"], batch.data_state))
            ids, _ = self.open.pop(0)
            self.tell(self.step, ids)
            self.history.append(list(ids))
            self.step += 1
        return self.history

    def tell(self, step, ids):
        drawn = np.asarray(ids, np.int64)
        rates = np.asarray([RATES[i % 3] for i in ids], np.float32)
        self.stream.curriculum.add(step, Results(drawn, rates))


def results(ids, rates) -> Results:
    return Results(np.asarray(ids, np.int64), np.asarray(rates, np.float32))


def rows(table) -> list[list[float]]:
    return [list(map(float, row)) for row in zip(*table.rows(np.arange(10))[1:], strict=True)]


def test_a_table_keeps_rates_streaks_and_the_last_visit_and_goes_back():
    config = CurriculumConfig(retire_after=2, postpone_after=2, postpone_steps=3)
    table = PassRateTable(10)
    assert not len(table.seen()) and set(table.pools(0, config)) == {NORMAL}
    table.learn(0, Results(np.array([7, 3, 5]), np.array([1.0, 0.0, 0.5], np.float32)), config)
    ids = [3, 5, 7]
    assert table.seen().tolist() == ids and table.rate_N[ids].tolist() == [0.0, 0.5, 1.0]
    assert table.pools(1, config)[ids].tolist() == [HARD, NORMAL, EASY]
    first = rows(table)
    second = table.learn(1, Results(np.array([3, 7, 4]), np.array([0.0, 1.0, 0.25], np.float32)), config)
    ids = [3, 4, 5, 7]
    assert table.seen().tolist() == ids and table.last_N[ids].tolist() == [1, 1, 0, 1]
    assert table.pools(2, config)[ids].tolist() == [POSTPONED, HARD, NORMAL, RETIRED]
    assert table.pools(4, config)[ids].tolist() == [HARD, HARD, NORMAL, RETIRED], (
        "a postponed prompt returns three steps after it was drawn"
    )
    third = table.learn(4, Results(np.array([3, 7]), np.array([0.75, 0.0], np.float32)), config)
    assert table.rate_N[ids].tolist() == [0.375, 0.25, 0.5, 0.5]
    assert table.pools(5, config)[ids].tolist() == [NORMAL, HARD, NORMAL, NORMAL]
    table.set(third)
    table.set(second)
    np.testing.assert_array_equal(rows(table), first)


def test_looking_at_newer_or_older_results_changes_no_draw(tokenizer, files):
    settings = {"rows": 3, "lag": 2, "retire_after": 2, "postpone_after": 1, "postpone_steps": 5, "hard_share": 0.25}
    expected = Training(stream(tokenizer, files, **settings), 2).run(30)
    looked = Training(stream(tokenizer, files, **settings), 2)
    for step in range(30):
        looked.run(1)
        known = looked.stream.curriculum
        first, sizes = known.memory(), known.sizes()
        assert sum(sizes.values()) == 30 and known.sizes() == sizes
        for name, array in known.memory().items():
            np.testing.assert_array_equal(array, first[name], f"{name} at {step}")
    assert looked.history == expected


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_batches_of_a_large_pool_are_those_of_all_its_records_in_order(tokenizer, tmp_path, share):
    """A draw sorts only the few oldest records of a pool, and the other records only if the few oldest do not
    suffice."""
    rows = [{"question": f"{'long ' * 20 if i % 3 else ''}{i}?", "answer": "1", "id": i} for i in range(300)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = stream(tokenizer, tmp_path, rows=4, lag=2, limit=40, hard_share=share)
    last = np.random.default_rng(0).integers(0, 90, 300)  # several records were drawn in the same step
    known = {name: np.zeros(0, np.int64) for name in ("newer_step", "newer_ids", "newer_rate")}
    none = np.zeros(300, np.int32)
    table = {"ids": np.arange(300), "rate": none.astype(np.float32), "solved": none, "failed": none, "last": last}
    made.curriculum.recall({**table, **known, "range": np.array([90, 90])})
    drawn = [i for _ in range(5) for i in next(made).fields["id"]]
    oldest = [i for i in np.argsort(last, kind="stable").tolist() if i % 3 == 0]
    ranks = [oldest.index(i) for i in drawn]
    assert ranks == [*range(12), *range(8)], (
        "records of the last two batches are not drawn again, because their results are not known yet"
    )


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_solved_prompts_do_not_come_back_and_failed_ones_do_after_their_rest(tokenizer, files, lag):
    made = stream(tokenizer, files, rows=2, lag=lag, retire_after=2, postpone_after=1, postpone_steps=12)
    history = Training(made, lag).run(90)
    visits = {i: [s for s, ids in enumerate(history) if i in ids] for i in range(30)}
    for i, steps in visits.items():
        if i % 3 == 0:
            assert len(steps) == 2, (i, steps)
        elif i % 3 == 2:
            assert len(steps) > 2 and min(np.diff(steps)) >= 12, (i, steps)
        else:
            assert len(steps) > 4, (i, steps)
    counts = made.curriculum.sizes()
    assert counts["retired"] == 10 and counts["unseen"] == 0
    assert counts["normal"] == 10 and sum(counts.values()) == 30


def test_shares_set_how_often_pools_come(tokenizer, files):
    made = stream(tokenizer, files, rows=5, easy_share=0.1, hard_share=0.5)
    history = Training(made).run(60)
    later = [i % 3 for ids in history[20:] for i in ids]  # all records have been seen by then
    assert [later.count(kind) for kind in range(3)] == [20, 80, 100]
    hard = [i for ids in history[20:] for i in ids if i % 3 == 2]
    assert max(hard.count(i) for i in set(hard)) - min(hard.count(i) for i in set(hard)) <= 1, (
        "hard records are drawn in turn, so no record is drawn twice more often than another"
    )
    assert all(len(set(ids)) == 5 for ids in history)


def test_a_share_of_nothing_leaves_a_pool_out(tokenizer, files):
    history = Training(stream(tokenizer, files, rows=5, easy_share=0.0, hard_share=0.0)).run(40)
    assert {i % 3 for ids in history[10:] for i in ids} == {1}


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("saved_at", [1, 7, 20])
def test_a_run_resumes_at_any_step_also_where_batches_in_flight_were_given_up(tokenizer, files, lag, saved_at):
    settings = {"retire_after": 2, "postpone_after": 1, "postpone_steps": 5, "hard_share": 0.25, "limit": 13}
    whole = Training(stream(tokenizer, files, rows=3, lag=lag, **settings), lag)
    expected = whole.run(30)
    assert whole.stream.skipped, "the test needs records that are too long"
    for keep in (True, False):
        first = Training(stream(tokenizer, files, rows=3, lag=lag, **settings), lag)
        first.run(saved_at)
        state_of_last = [state for _, state in first.open]
        again = Training(stream(tokenizer, files, rows=3, lag=lag, **settings), lag)
        again.step, again.history = first.step, list(first.history)
        memory = {name: array.copy() for name, array in first.stream.curriculum.memory(saved_at).items()}
        if keep and state_of_last:
            again.stream.restore(state_of_last[-1])
            again.open = list(first.open)
        else:  # a failed run's checkpoint has only the position after the last trained batch
            plain = Training(stream(tokenizer, files, rows=3, lag=lag, **settings), lag)
            states = []
            for step in range(saved_at):
                if step >= lag:
                    plain.tell(step - lag, expected[step - lag])
                states.append(next(plain.stream).data_state)
            again.stream.restore(states[-1])
        again.stream.curriculum.recall(memory)
        assert again.run(30 - saved_at) == expected


def test_sources_keep_their_weights_while_prompts_of_one_retire(tokenizer, files):
    sources = tuple({"path": str(files / f"{name}.jsonl"), "weight": w} for name, w in (("a", 2.0), ("b", 1.0)))
    made = stream(tokenizer, files, sources=sources, retire_after=1, hard_share=0.25)
    names = []
    for step in range(40):
        batch = next(made)
        names += batch.fields["dataset"]
        numbers = [i + 30 * (name == "b") for i, name in zip(batch.fields["id"], batch.fields["dataset"], strict=True)]
        solved = [1.0 if number < 30 and number % 3 == 0 else 0.5 for number in numbers]
        made.curriculum.add(step, results(numbers, solved))
    assert names.count("a") == 160 and names.count("b") == 80
    assert made.curriculum.sizes()["retired"] == 10


def test_where_all_are_postponed_or_retired_those_postponed_come_back_first_and_it_says_so(tokenizer, files, caplog):
    made = stream(tokenizer, files, rows=10, retire_after=1, postpone_after=1, postpone_steps=1000)
    for step in range(3):
        ids = next(made).fields["id"]
        made.curriculum.add(step, results(ids, [float(i < 12) for i in ids]))
    assert "although postponed or retired" not in caplog.text
    back = [next(made).fields["id"]]
    made.curriculum.add(3, results(back[0], [1.0] * 10))
    back.append(next(made).fields["id"])
    assert all(i >= 12 for i in back[0]) and sum(i >= 12 for i in back[1]) >= 8
    assert "were drawn although postponed or retired" in caplog.text and "data.curriculum.postpone_steps" in caplog.text
    made.curriculum.add(4, results(range(30), [1.0] * 30))
    assert len(set(next(made).fields["id"])) == 10, "a run whose prompts are all retired goes on"


def test_a_batch_may_hold_more_prompts_than_there_are_records(tokenizer, files):
    made = stream(tokenizer, files, rows=45, retire_after=1)
    assert {ids for ids in next(made).fields["id"]} == set(range(30))


def test_prompts_that_are_all_too_long_are_refused_as_without_a_curriculum(tokenizer, files):
    with pytest.raises(
        ValueError, match=r"All of 30 records are longer than 1 tokens \(the .*\): raise rollout\.max_prompt_len"
    ):
        next(stream(tokenizer, files, limit=1, retire_after=1))


def test_settings_that_contradict_each_other_are_refused(tokenizer, files):
    with pytest.raises(ValueError, match=r"^CurriculumConfig\.hard_rate=0\.8 must be below"):
        CurriculumConfig(hard_rate=0.8)
    with pytest.raises(ValueError, match=r"are 1\.2 together: they must be at most 1"):
        CurriculumConfig(easy_share=0.6, hard_share=0.6)
    made = Curriculum(CurriculumConfig(retire_after=1, metric="asnwer"), 9)
    with pytest.raises(
        ValueError, match=r"data\.curriculum\.metric='asnwer' is not a reward function.*'reward', or 'answer'"
    ):
        made.begin(lag=0, names=["answer"])


def test_a_position_with_a_curriculum_and_one_without_are_not_taken_for_each_other(tokenizer, files):
    data = DataConfig(path=str(files / "a.jsonl"), system_prompt="", eval_fraction=0.0)
    plain = PromptStream.from_config(data, tokenizer, prompts_per_step=6, max_prompt_length=64)
    chosen = stream(tokenizer, files, retire_after=1)
    with pytest.raises(ValueError, match=r"saved without data\.curriculum, which this run uses"):
        chosen.restore(plain.state())
    with pytest.raises(ValueError, match=r"saved with data\.curriculum, which this run does not use"):
        plain.restore(chosen.state())
