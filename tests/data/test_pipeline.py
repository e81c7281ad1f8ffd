"""Streams of prompts: shape, order, exact resume, sharding, skipped records and held-out records."""

import dataclasses
import functools
import json
import pathlib
import shutil

import numpy as np
import pytest

import podrl
from podrl.config import build
from podrl.data import pipeline, problems, sources
from podrl.data.pipeline import DataConfig, PromptStream, held_out_prompts
from podrl.data.problem_generator import held_out
from podrl.data.tokenizer import Tokenizer

TINY = pathlib.Path(podrl.__file__).parent / "assets" / "tiny"
GSM8K = pathlib.Path(__file__).parents[2] / ".." / "shared" / "data" / "gsm8k_train.jsonl"
LIMIT = 52


@pytest.fixture
def file(tmp_path):
    """Writes ten records, of which the questions of records 3 and 7 are long."""
    rows = [
        {"question": f"{'Why? ' * (60 if i in (3, 7) else 1)}{i}", "answer": f"#### {i}", "id": i} for i in range(10)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def stream(tokenizer, rows=4, **config):
    return PromptStream.from_config(
        DataConfig(**config), tokenizer, prompts_per_step=rows, max_prompt_length=config.pop("limit", LIMIT)
    )


def same(a, b):
    return (
        np.array_equal(a.tokens_PT, b.tokens_PT)
        and np.array_equal(a.length_P, b.length_P)
        and np.array_equal(a.index_P, b.index_P)
        and (list(a.text), dict(a.fields), a.data_state) == (list(b.text), dict(b.fields), b.data_state)
    )


def test_a_batch_of_the_embedded_task(tokenizer):
    batch = next(stream(tokenizer))
    assert batch.tokens_PT.shape == (4, LIMIT) and batch.index_P.tolist() == [0, 1, 2, 3]
    for p in range(4):
        length = batch.length_P[p]
        assert tokenizer.encode(batch.text[p]) == batch.tokens_PT[p, :length].tolist()
        assert (batch.tokens_PT[p, length:] == tokenizer.pad_id).all()
        assert batch.fields["question"][p] in batch.text[p]
        assert batch.fields["solution"][p].endswith(f"={batch.fields['answer'][p]}.")
    assert set(batch.fields) == {"question", "answer", "solution"}


def test_resume_is_exact(tokenizer, file):
    for config in ({}, {"path": file, "system_prompt": "", "eval_fraction": 0.0}):
        whole = stream(tokenizer, rows=3, **config)
        batches = [next(whole) for _ in range(9)]  # more than two epochs of the file
        resumed = stream(tokenizer, rows=3, **config)
        resumed.restore(batches[3].data_state)
        assert all(same(next(resumed), batch) for batch in batches[4:])
        assert resumed.skipped == whole.skipped
        assert json.loads(batches[3].data_state) is not None


def test_resume_with_other_data_is_refused(tokenizer):
    state = stream(tokenizer).state()
    with pytest.raises(ValueError, match=r"records=1000000, but data\.path gives records=5: "):
        stream(tokenizer, size=5).restore(state)
    with pytest.raises(ValueError, match=r"seed=42, but data\.seed gives seed=1"):
        stream(tokenizer, seed=1).restore(state)


def test_every_epoch_holds_every_record_once_in_a_new_order(tokenizer):
    s = stream(tokenizer, rows=20, size=20)
    first, second = next(s), next(s)
    assert sorted(first.text) == sorted(second.text) and list(first.text) != list(second.text)
    assert s.steps_per_epoch == 1
    ordered = next(stream(tokenizer, rows=3, size=20, shuffle=False))
    assert list(ordered.fields["question"]) == [problems.GENERATOR.problem("train", i, 42).question for i in range(3)]


def test_long_prompts_are_skipped_and_counted(tokenizer, file):
    s = stream(tokenizer, rows=8, path=file, system_prompt="", eval_fraction=0.0, shuffle=False)
    batch = next(s)
    assert batch.fields["id"] == [0, 1, 2, 4, 5, 6, 8, 9] and s.skipped == 2
    assert batch.index_P.tolist() == list(range(8))
    next(s)
    assert s.skipped == 4


def test_long_prompts_can_be_errors(tokenizer, file):
    s = stream(tokenizer, rows=8, path=file, system_prompt="", eval_fraction=0.0, long_prompts="error")
    with pytest.raises(ValueError, match=r"has \d+ tokens: rollout\.max_prompt_length=52 .*data\.long_prompts=skip"):
        next(s)


def test_nothing_but_long_prompts_is_an_error(tokenizer):
    s = PromptStream.from_config(DataConfig(size=7), tokenizer, prompts_per_step=2, max_prompt_length=10)
    with pytest.raises(
        ValueError,
        match=r"All of 7 records .* 10 tokens \(the shortest has \d\d, the longest \d\d\): raise rollout\.max_pr",
    ):
        next(s)


def test_held_out_problems_are_fixed_distinct_and_not_in_training(tokenizer):
    config = DataConfig(seed=5)
    batches = held_out_prompts(config, tokenizer, count=50, max_prompt_length=LIMIT, batch_size=20)
    assert [len(b.text) for b in batches] == [20, 20, 10]
    assert np.concatenate([b.index_P for b in batches]).tolist() == list(range(50))
    again = held_out_prompts(config, tokenizer, count=50, max_prompt_length=LIMIT, batch_size=20)
    assert all(same(a, b) for a, b in zip(batches, again, strict=True))
    solutions = [s.rstrip(".").replace(". ", ";") for b in batches for s in b.fields["solution"]]
    assert len(set(solutions)) == 50 and all(map(held_out, solutions))
    assert held_out_prompts(config, tokenizer, count=0, max_prompt_length=LIMIT) == []


def test_a_file_is_split_by_question(tokenizer, tmp_path):
    rows = [{"question": f"{i % 30}?", "answer": "1"} for i in range(60)]  # every question twice
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(path=str(path), eval_fraction=0.3, system_prompt="")
    (held,) = held_out_prompts(config, tokenizer, count=100, max_prompt_length=LIMIT)
    s = PromptStream.from_config(config, tokenizer, prompts_per_step=1, max_prompt_length=LIMIT)
    trained = {next(s).fields["question"][0] for _ in range(s.steps_per_epoch)}
    evaluated = set(held.fields["question"])
    assert evaluated and trained and not trained & evaluated and len(trained | evaluated) == 30


def test_a_file_of_its_own_for_evaluation(tokenizer, file, tmp_path):
    (tmp_path / "e.csv").write_text("question,answer\nHow many?,4\n")
    config = DataConfig(path=file, eval_path=str(tmp_path / "e.csv"), system_prompt="")
    (held,) = held_out_prompts(config, tokenizer, count=5, max_prompt_length=LIMIT)
    assert held.fields["question"] == ["How many?"] and held.fields["answer"] == ["4"]
    assert (
        PromptStream.from_config(config, tokenizer, prompts_per_step=10, max_prompt_length=LIMIT).steps_per_epoch == 1
    )


def test_records_keep_their_other_fields_and_gsm8k_its_solution(tokenizer, file):
    config = DataConfig(path=file, shuffle=False, eval_fraction=0.0)
    batch = next(PromptStream.from_config(config, tokenizer, prompts_per_step=2, max_prompt_length=120))
    assert batch.fields["id"] == [0, 1]
    assert batch.fields["answer"] == ["0", "1"] and batch.fields["solution"] == ["#### 0", "#### 1"]
    # podrl's system prompt is missing: the prompt has only words of the template and of the record.
    assert "<reasoning>" not in batch.text[0] and "system_prompt" not in batch.fields


def test_renamed_fields_keep_their_names_too(tokenizer, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"query": "2+2?", "gold": "4"}\n')
    config = DataConfig(path=str(path), question_field="query", answer_field="gold", eval_fraction=0.0)
    fields = next(PromptStream.from_config(config, tokenizer, prompts_per_step=1, max_prompt_length=120)).fields
    assert fields["query"] == fields["question"] == ["2+2?"] and fields["gold"] == fields["answer"] == ["4"]


def test_a_list_of_prompts(tokenizer):
    prompts = [{"prompt": "2+2=", "answer": "4"}, "<bos>3+3="]
    s = PromptStream.from_list(prompts, tokenizer, prompts_per_step=2, max_prompt_length=8)
    batch = next(s)
    assert batch.text == ["2+2=", "<bos>3+3="] and batch.fields["answer"] == ["4", None]
    assert batch.tokens_PT[:, 0].tolist() == [tokenizer.bos_id] * 2 and batch.length_P.tolist() == [5, 5]
    assert next(s).index_P.tolist() == [2, 3]
    for bad in ({"text": "?"}, 7, ""):
        with pytest.raises(ValueError, match="Prompt 1"):
            PromptStream.from_list(["a", bad], tokenizer, prompts_per_step=1, max_prompt_length=8)


def test_prompts_of_a_list_that_are_held_out_are_left_out_and_counted(tokenizer, caplog):
    prompts = ["2+2= ?", {"question": "3+3= ?"}, {"messages": [{"role": "user", "content": "4+4= ?"}]}, "5+5= ?"]
    made = functools.partial(PromptStream.from_list, tokenizer=tokenizer, prompts_per_step=1, max_prompt_length=64)
    held_out = [{"question": " 2+2=  ?"}, "4+4= ?"]
    stream = made(prompts, held_out=held_out)
    assert [(place, fields["question"]) for place, fields in stream.listed] == [
        ("Prompt 1", "3+3= ?"),
        ("Prompt 3", "5+5= ?"),
    ]
    assert "2 of 4 records of train_ds repeat a question of eval_ds" in caplog.text
    with pytest.raises(ValueError, match=r"Every record of train_ds, 4 in number, repeats a question of eval_ds"):
        made(prompts, held_out=prompts)
    with pytest.raises(ValueError, match="Held-out prompt 0: 'prompt' is ''"):
        made(prompts, held_out=[""])


def test_an_empty_source_is_an_error(tokenizer):
    with pytest.raises(ValueError, match="no records to train on"):
        PromptStream.from_list([], tokenizer, prompts_per_step=1, max_prompt_length=8)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"path": ""}, r"data\.path is ''"),
        ({"eval_fraction": 1.0}, r"data\.eval_fraction=1\.0"),
        ({"long_prompts": "drop"}, r"long_prompts"),
        ({"quesiton_field": "q"}, r"Did you mean 'question_field'\?"),
    ],
)
def test_bad_configurations(values, message):
    with pytest.raises(ValueError, match=message):
        build(DataConfig, values, "config.data")


def test_a_bad_line_is_named_through_the_pipeline(tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"question": "q", "answer": "1"}\nnonsense\n')
    with pytest.raises(ValueError, match=r"a\.jsonl line 2 is not JSON"):
        stream(tokenizer, path=str(tmp_path / "a.jsonl"))


def test_the_real_gsm8k(tokenizer):
    if not GSM8K.exists():
        pytest.skip("GSM8K is not on this machine")
    config = DataConfig(path=str(GSM8K))
    s = PromptStream.from_config(config, tokenizer, prompts_per_step=16, max_prompt_length=256)
    batch = next(s)
    assert batch.tokens_PT.shape == (16, 256) and all(float(a) is not None for a in batch.fields["answer"])
    (held,) = held_out_prompts(config, tokenizer, count=200, max_prompt_length=256)
    assert len(held.text) == 200
    assert len(sources.read(str(GSM8K))) > 7000


def test_a_prompt_far_longer_than_the_others_is_shown_at_every_start(tmp_path, tokenizer, caplog):
    path = tmp_path / "d.jsonl"
    questions = [*(f"{i}+1=" for i in range(150)), "17+" + "1" * 900]
    path.write_text("".join(json.dumps({"question": text, "answer": "1"}) + "\n" for text in questions))
    config = DataConfig(path=str(path), eval_fraction=0.0, cache=str(tmp_path / "cache"))
    for _ in range(2):  # the second result comes from the cache
        caplog.clear()
        assert pipeline.longest_prompt(config, tokenizer) > 900
        assert "; 99 of 100 have at most 64. It begins '17+111" in caplog.text
        assert "--config.rollout.max_prompt_length=64 leaves longer" in caplog.text
    caplog.clear()
    path.write_text("".join(json.dumps({"question": text, "answer": "1"}) + "\n" for text in questions[:-1]))
    assert pipeline.longest_prompt(config, tokenizer) == 64 and not caplog.text


def test_the_only_prompt_is_not_longer_than_others(tmp_path, tokenizer, caplog):
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps({"question": "17+" + "1" * 900, "answer": "1"}) + "\n")
    assert pipeline.longest_prompt(DataConfig(path=str(path), eval_fraction=0.0), tokenizer) > 900
    assert not caplog.text


def test_the_longest_prompt_is_looked_for_again_only_where_it_may_have_changed(tmp_path, tokenizer, monkeypatch):
    looked = []

    def look(config, tokenizer, look, real=pipeline._longest):
        looked.append(config.path)
        return real(config, tokenizer, look)

    monkeypatch.setattr(pipeline, "_longest", look)
    path, place = tmp_path / "d.jsonl", str(tmp_path / "cache")
    write = lambda words: path.write_text(json.dumps({"question": "word " * words, "answer": "1"}) + "\n")  # noqa: E731
    write(5)
    config = DataConfig(path=str(path), system_prompt="", eval_fraction=0.0, cache=place)
    assert pipeline.longest_prompt(config, tokenizer) == pipeline.longest_prompt(config, tokenizer) == 64
    assert len(looked) == 1
    write(200)
    found = pipeline.longest_prompt(config, tokenizer)
    assert found > 64 and len(looked) == 2
    longer = dataclasses.replace(config, system_prompt="Say " * 50)
    assert pipeline.longest_prompt(longer, tokenizer) > found and len(looked) == 3
    other = tmp_path / "model"
    shutil.copytree(tokenizer.directory, other)
    text = json.loads((other / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps(text | {"chat_template": "{{ messages[-1].content * 2 }}"}))
    assert pipeline.longest_prompt(config, Tokenizer(other)) > found and len(looked) == 4
    assert pipeline.longest_prompt(config, tokenizer, look=1) == found and len(looked) == 5
    for _ in range(2):
        # With cache="" the cache lies in a directory that ends with the process.
        pipeline.longest_prompt(dataclasses.replace(config, cache=""), tokenizer)
    assert len(looked) == 6
