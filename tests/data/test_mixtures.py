"""Mixtures of sources: shares, exact resume, transforms, the cache, dropped records, rewards per source."""

import json

import numpy as np
import pytest

from podrl.data import cache, mixture
from podrl.data.mixture import split
from podrl.data.pipeline import DataConfig, PromptStream, held_out_prompts, longest_prompt
from podrl.data.sft import check_form
from podrl.rewards.compose import RewardConfig, Rewards


@pytest.fixture
def files(tmp_path):
    """Writes three files of 60 records: 'a' and 'b' have the same field names, 'c' has others."""
    for name in "abc":
        keys = ("problem", "result") if name == "c" else ("question", "answer")
        rows = [{keys[0]: f"{name} {i}{'?' * (i % 10)}", keys[1]: f"{i}", "id": i} for i in range(60)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.py").write_text(
        "def odd(record):\n    return record | {'answer': record['answer'] + '!'} if record['id'] % 2 else None\n"
        "def bad(record):\n    return 1 / (record['id'] - 7)\n"
        "def late(record):\n    import time\n    time.sleep(60)\n"
    )
    return tmp_path


def config(files, *sources, **more):
    """Makes the configuration of a mixture of these files, named by their letters."""
    values = {"system_prompt": "", "eval_fraction": 0.0, "cache": str(files / "cache"), **more}
    placed = tuple({**source, "path": str(files / f"{source['path']}.jsonl")} for source in sources)
    return DataConfig(sources=placed, **values)


def stream(tokenizer, made, rows=6, limit=64):
    return PromptStream.from_config(made, tokenizer, prompts_per_step=rows, max_prompt_length=limit)


RENAMED = {"transforms": ({"rename": {"problem": "question", "result": "answer"}},)}


def test_weights_are_shares_and_every_source_has_its_own_order(tokenizer, files):
    made = config(files, {"path": "a", "weight": 3.0}, {"path": "b", "weight": 1.0, "template": "plain", "group": "g"})
    drawn = [next(stream(tokenizer, made, rows=80))][0]
    names = drawn.fields["dataset"]
    assert names.count("a") == 60 and names.count("b") == 20
    first = [i for name, i in zip(names, drawn.fields["id"], strict=True) if name == "a"]
    assert sorted(first) == list(range(60)) and first != sorted(first)
    assert made.groups == ("g",)
    assert drawn.fields["group"] == ["g" if name == "b" else None for name in names]
    for name, text in zip(names, drawn.text, strict=True):
        assert ("<start_of_turn>" in text) == (name == "a")
    assert names[:8].count("a") == 6  # the shares hold from the start


def test_without_weights_every_record_is_drawn_as_often(tokenizer, files):
    made = config(files, {"path": "a", "count": 10}, {"path": "b", "fraction": 0.5})
    s = stream(tokenizer, made, rows=40)
    drawn = next(s)
    assert s.steps_per_epoch == 1 and len(set(zip(drawn.fields["dataset"], drawn.fields["id"], strict=True))) == 40
    again = config(files, {"path": "a", "count": 10}, {"path": "b", "fraction": 0.5}, seed=1)
    assert sorted(next(stream(tokenizer, again, rows=40)).fields["id"]) != sorted(drawn.fields["id"])


def test_a_mixture_resumes_at_any_batch(tokenizer, files):
    made = config(files, {"path": "a", "weight": 2.0}, {"path": "b", "weight": 1.0})
    short = dict(rows=4, limit=13)  # every source has prompts over the limit
    whole = stream(tokenizer, made, **short)
    batches = [next(whole) for _ in range(30)]
    assert whole.skipped == sum(whole.too_long.values()) and all(whole.too_long.values())
    for k in (0, 7, 22):
        resumed = stream(tokenizer, made, **short)
        resumed.restore(batches[k].data_state)
        for batch in batches[k + 1 :]:
            again = next(resumed)
            assert np.array_equal(again.tokens_PT, batch.tokens_PT) and again.data_state == batch.data_state
    other = config(files, {"path": "a", "weight": 1.0}, {"path": "b", "weight": 1.0})
    with pytest.raises(ValueError, match=r"belongs to the sources \[\['a', 60, 2\.0\].*data\.sources gives"):
        stream(tokenizer, other, **short).restore(batches[0].data_state)


def test_one_source_has_the_order_of_a_path(tokenizer, files):
    one = stream(tokenizer, config(files, {"path": "a"}))
    path = stream(tokenizer, DataConfig(path=str(files / "a.jsonl"), system_prompt="", eval_fraction=0.0))
    for _ in range(12):
        a, b = next(one), next(path)
        assert np.array_equal(a.tokens_PT, b.tokens_PT) and a.data_state == b.data_state


def test_transforms_rename_drop_and_map_and_are_counted(tokenizer, files):
    mapped = f"{files / 'mine.py'}:odd"
    steps = (*RENAMED["transforms"], {"length": {"field": "question", "least": 5}}, {"map": mapped})
    made = config(files, {"path": "c", "transforms": steps}, {"path": "a"}, eval_fraction=0.2)
    rows = split(made).rows()
    long = [i for i in range(60) if len(f"c {i}{'?' * (i % 10)}") >= 5]
    odd = [i for i in long if i % 2]
    assert rows[0]["records"] == 60 and rows[0]["length"] == 60 - len(long)
    assert rows[0]["map odd"] == len(long) - len(odd)
    assert rows[0]["held out"] + rows[0]["used"] == len(odd) and rows[0]["held out"] > 0
    assert abs(sum(row["share"] for row in rows) - 1) < 1e-5
    part = split(made).parts[0]
    assert all(record["answer"].endswith("!") and record["id"] in odd for record in part.train)
    held = held_out_prompts(made, tokenizer, count=6, max_prompt_length=64)[0]
    assert held.fields["dataset"] == ["c", "a"] * 3  # the sources come in turn
    assert longest_prompt(made, tokenizer) == 64


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (({"length": {"field": "qestion", "most": 9}},), r"length names 'qestion', which no record of .*a\.jsonl has"),
        (({"rename": {"nope": "x"}},), r"rename names 'nope', which no record of .*a\.jsonl has \(they have question,"),
        (({"rename": {"question": "q"}},), r"a\.jsonl, after the transforms of data\.sources: .*line 1 has q,"),
    ],
)
def test_transforms_that_do_nothing_or_take_the_question_are_refused(files, steps, message):
    with pytest.raises(ValueError, match=message):
        split(config(files, {"path": "a", "transforms": steps}))


def test_a_failing_map_names_the_record(files):
    def opened(name, **more):
        return split(config(files, {"path": "a", "transforms": ({"map": f"{files / 'mine.py'}:{name}", **more},)}))

    with pytest.raises(ValueError, match=r"(?s)mine\.py:bad failed for .*a\.jsonl line 1: .*neither a dict nor None"):
        opened("bad")
    with pytest.raises(
        ValueError, match=r"mine\.py:late gave no answer for .*line 1 to .*line 60 within deadline_s=0\.5"
    ):
        opened("late", deadline_s=0.5)
    with pytest.raises(ValueError, match=r"mine\.py:none cannot be loaded"):
        opened("none")


def test_what_was_read_is_cached_by_content(files, monkeypatch):
    monkeypatch.setattr(mixture, "WORTH", 1)
    made = config(files, {"path": "a"}, {"path": "c", **RENAMED}, eval_fraction=0.2)

    def found():
        mixture._opened.cache_clear()
        parts = split(made).parts
        return [[dict(record) for side in (part.train, part.held_out) for record in side] for part in parts]

    first = found()
    read: list[str] = []
    monkeypatch.setattr("podrl.data.notes.shape.check", lambda record, place, field: read.append(place))
    assert found() == first and not read
    for stored in (files / "cache").glob("*.npz"):  # damaged cache entries are made anew
        stored.write_bytes(stored.read_bytes()[:100])
    assert found() == first and len(read) == 120
    (files / "a.jsonl").write_text((files / "a.jsonl").read_text() + '{"question": "new", "answer": "1"}\n')
    changed = found()
    assert len(read) == 181 and {"question": "new", "answer": "1"} in changed[0] and changed[1] == first[1]
    assert found() == changed and len(read) == 181
    monkeypatch.setattr(cache, "_code", lambda: "of another version, which may refuse what this one accepts")
    assert found() == changed and len(read) == 181 + 121


def test_files_and_cache_may_lie_in_a_bucket(files, bucket, monkeypatch):
    monkeypatch.setattr(mixture, "WORTH", 1)
    (files / "mine.py").write_text("def kept(record):\n    return record if record['id'] < 9 else None\n")
    steps = (*RENAMED["transforms"], {"map": f"{files / 'mine.py'}:kept"})
    shares = ({"path": "a", "weight": 2.0}, {"path": "c", "weight": 1.0, "transforms": steps})
    for name in "ac":
        bucket.put(f"mixed/{name}.jsonl", (files / f"{name}.jsonl").read_bytes())
    there = tuple({**source, "path": f"gs://bucket/mixed/{source['path']}.jsonl"} for source in shares)
    made = DataConfig(sources=there, system_prompt="", eval_fraction=0.2, cache="gs://bucket/cache")

    def found(opened):
        return [[dict(record) for side in (part.train, part.held_out) for record in side] for part in opened.parts]

    first = split(made)
    assert found(first) == found(here := split(config(files, *shares, eval_fraction=0.2)))
    assert [row["map kept"] for row in first.rows()[1:]] == [51] and first.rows()[1] == here.rows()[1]
    mixture._opened.cache_clear()
    read: list[str] = []
    monkeypatch.setattr("podrl.data.notes.shape.check", lambda record, place, field: read.append(place))
    (files / "mine.py").write_text((files / "mine.py").read_text())  # the same content with another modification time
    monkeypatch.setattr("podrl.data.transforms.Functions", None)  # no transform is called again
    assert found(split(made)) == found(here) and not read


def test_a_directory_has_splits(tokenizer, files):
    (files / "d").mkdir()
    for name in ("train-0", "train-1", "test-0"):
        (files / "d" / f"{name}.jsonl").write_text(json.dumps({"question": name, "answer": "1"}) + "\n")
    made = DataConfig(sources=({"path": str(files / "d"), "split": "train"},), eval_fraction=0.0)
    assert [record["question"] for record in split(made).parts[0].train] == ["train-0", "train-1"]
    with pytest.raises(ValueError, match=r"split='dev' must be a directory that holds files dev\*"):
        split(DataConfig(sources=({"path": str(files / "d"), "split": "dev"},)))


def test_rewards_of_a_source_score_its_records_alone():
    asked = RewardConfig(fns=("exact_format",), named=("r1_format", "exact_format"))
    done = "<reasoning>a</reasoning><answer>1</answer>"
    fields = {"reward_fns": [None, ["r1_format"], ["r1_format", "exact_format"]]}
    with Rewards(asked) as rewards:
        assert rewards.names == ("exact_format", "r1_format")
        said = "<think>a</think><answer>1</answer>"
        reward_FB = rewards.score(["p"] * 3, [done, said, done], fields)
        assert reward_FB[0].tolist() == [3.0, 0.0, 3.0]
        assert reward_FB[1, 0] == 0.0 and reward_FB[1, 1] != 0.0
        assert rewards.combine(reward_FB).tolist() == reward_FB.sum(axis=0).tolist()


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        (({"path": "a.jsonl", "count": 1, "fraction": 0.5},), "count=1 and fraction=0.5: give one"),
        (({"path": "a.jsonl"}, {"path": "x/a.jsonl"}), "several sources called a: give each a 'name'"),
        (
            ({"path": "a.jsonl", "weight": 1.0}, {"path": "b.jsonl"}),
            "no weight is set for b, but other sources have one",
        ),
        (({"path": "a.jsonl", "transforms": ({},)},), "must set exactly one of 'rename', 'length' and 'map'"),
        (({"path": "problems", "split": "train"},), "embedded task, which has no transforms"),
        (({"path": ""},), "path is ''"),
        (({"path": "a.jsonl", "wieght": 1.0},), "Did you mean 'weight'"),
        (({"path": "a", "group": "a/b"},), r"a has group='a/b', which is part of names of metrics"),
    ],
)
def test_bad_mixtures_are_refused(sources, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(sources=sources)


def test_more_than_there_is_cannot_be_chosen(files):
    with pytest.raises(ValueError, match="a has count=100, but only 60 records to choose from"):
        split(config(files, {"path": "a", "count": 100}))


def test_a_source_says_what_its_records_are_whatever_they_say_themselves(tokenizer, tmp_path):
    own = {"dataset": "theirs", "group": "theirs", "env": "theirs", "reward_fns": ["theirs"]}
    for name in ("a", "b"):
        rows = [{"question": f"{name}{i}", "answer": "1", **own} for i in range(4)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"group": "g", "env": "none", "reward": ("number",)}
    paths = [{"path": str(tmp_path / f"{name}.jsonl"), **given} for name in ("a", "b")]
    for sources in (paths, paths[:1]):
        config = DataConfig(sources=tuple(sources), eval_fraction=0.0, cache="")
        batch = next(PromptStream.from_config(config, tokenizer, prompts_per_step=8, max_prompt_length=64))
        assert set(batch.fields["dataset"]) == {"a", "b"} if len(sources) > 1 else {"a"}
        assert set(batch.fields["group"]) == {"g"}
        assert set(batch.fields["env"]) == {"none"}
        assert batch.fields["reward_fns"] == [["number"]] * 8


SAME = ["What is 2+2?", "what  IS\t2+2?", "WHAT IS 2+2? ", "What\nis 2+2?"]


def test_questions_that_differ_in_case_and_space_are_on_one_side(tokenizer, tmp_path):
    for name, at in (("a", 0), ("b", 2)):
        rows = [{"question": f"{SAME[at + i % 2]} {n}", "answer": "4"} for n in range(30) for i in (0, 1)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = tuple({"path": str(tmp_path / f"{name}.jsonl")} for name in ("a", "b"))
    opened = split(DataConfig(sources=sources, eval_fraction=0.4, cache=""))
    train = {_same(part.train[i]) for part in opened.parts for i in range(len(part.train))}
    held = {_same(part.held_out[i]) for part in opened.parts for i in range(len(part.held_out))}
    assert train
    assert held
    assert not train & held


def test_what_the_evaluation_file_asks_is_not_trained_on_and_counted(tmp_path, caplog):
    (tmp_path / "e.jsonl").write_text(json.dumps({"question": SAME[0], "answer": "4"}) + "\n")
    rows = [{"question": one, "answer": "4"} for one in [*SAME, "3+3?"]]
    rows.append({"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": SAME[1]}]})
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {"eval_path": str(tmp_path / "e.jsonl"), "cache": ""}
    opened = split(DataConfig(path=str(tmp_path / "t.jsonl"), **config))
    assert [record["question"] for record in map(opened.parts[0].train.__getitem__, range(1))] == ["3+3?"]
    assert opened.rows()[0]["asked by held-out records"] == 5
    assert "5 of 6 records" in caplog.text
    with pytest.raises(
        ValueError, match=r"Every record of .*e\.jsonl, 1 in number, repeats a question of data\.eval_path="
    ):
        split(DataConfig(path=str(tmp_path / "e.jsonl"), **config))


def test_what_one_source_holds_out_no_other_trains_on(tmp_path):
    answered = [{"question": f"q{i}?", "completion": "c", "prompt": f"q{i}?", "answer": "1"} for i in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answered))
    other = [{"prompt": f" Q{i}? ", "completion": "c"} for i in range(40)]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in other))
    sources = tuple({"path": str(tmp_path / f"{name}.jsonl")} for name in ("a", "b"))
    opened = split(DataConfig(sources=sources, eval_fraction=0.3, cache=""), check_form)
    held = {_same(opened.parts[0].held_out[i]) for i in range(len(opened.parts[0].held_out))}
    train = {_same(opened.parts[1].train[i]) for i in range(len(opened.parts[1].train))}
    assert held
    assert not held & train
    assert opened.rows()[1]["asked by held-out records"] == len(held)


def _same(record):
    return " ".join(record.get("question", record.get("prompt")).lower().split())


def test_a_path_beside_sources_is_refused_unless_it_is_that_of_a_configuration():
    sources: tuple = ({"path": "problems"},)
    for path in ("", "sums", "problems"):
        assert DataConfig(path=path, sources=sources).path == ""
    with pytest.raises(
        ValueError, match=r"DataConfig\.path='mine\.jsonl' is not read, because DataConfig\.sources names the"
    ):
        DataConfig(path="mine.jsonl", sources=sources)


def test_renaming_onto_another_field_is_refused(files):
    with pytest.raises(ValueError, match=r"a\.jsonl line 1 has .* gives two of these fields the same name"):
        split(config(files, {"path": "a", "transforms": ({"rename": {"id": "answer"}},)}))


def test_records_to_train_on_that_a_set_asks_too_are_counted(tmp_path):
    rows = [{"question": one, "answer": "4"} for one in [*SAME, "3+3?"]]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "s.jsonl").write_text(json.dumps({"question": SAME[2].lower(), "answer": "4"}) + "\n")
    paths = (str(tmp_path / "t.jsonl"), str(tmp_path / "s.jsonl"))
    trained, asked = (split(DataConfig(path=path, eval_fraction=0.0, cache="")) for path in paths)
    assert trained.count_shared_questions(asked) == 4


def test_a_record_that_names_no_function_of_the_job_is_an_error_and_not_a_reward_of_0():
    with Rewards(RewardConfig(fns=("number",))) as rewards, pytest.raises(ValueError, match="names 'nubmer', which is"):
        rewards.score(["q"], ["<answer>4"], {"answer": ["4"], "reward_fns": [["nubmer"]]})
