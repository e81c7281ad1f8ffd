import json
import math
import pathlib

import pytest

import podrl
from podrl import generate

TINY = pathlib.Path(podrl.__file__).parent / "assets" / "tiny"


def write(path: pathlib.Path, text: str) -> pathlib.Path:
    path.write_text(text)
    return path


def test_prompts_are_read_with_their_fields(tmp_path):
    path = write(tmp_path / "p.jsonl", '{"prompt": "a", "id": 1}\n\n{"messages": [{"role": "user", "content": "b"}]}\n')
    assert [sorted(record) for record in generate.read_prompts(path)] == [["id", "prompt"], ["messages"]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n{"prompt": \n', "line 2: not JSON"),
        ('{"question": "a"}\n', 'line 1: must be an object with "prompt" or "messages"'),
        ("\n", "holds no prompt"),
    ],
)
def test_bad_files_are_named(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        list(generate.read_prompts(write(tmp_path / "p.jsonl", text)))


def test_a_file_of_prompts_is_completed(tmp_path, capsys):
    prompts = write(
        tmp_path / "p.jsonl",
        '{"prompt": "Tom has 3 apples and 4 pears. How many?", "id": "a"}\n'
        '{"messages": [{"role": "user", "content": "2+2?"}], "id": "b"}\n{"prompt": "9", "id": "c"}\n',
    )
    out = tmp_path / "o.jsonl"
    arguments = [f"--model={TINY}", f"--prompts={prompts}", f"--out={out}", "--mesh=data=8", "--n=3"]
    arguments += ["--temperature=0.7", "--top_p=0.9", "--max_new=9", "--chat", "--seed=4", "--stop=="]
    assert generate.main(arguments) == 0
    records = sorted((json.loads(line) for line in out.read_text().splitlines()), key=lambda r: r["index"])
    assert [(r["index"], r["id"]) for r in records] == [(0, "a"), (1, "b"), (2, "c")]
    completions = [c for r in records for c in r["completions"]]
    assert len(completions) == 9
    for c in completions:
        assert 1 <= c["tokens"] <= 9 and c["logprob"] < 0 and math.isfinite(c["logprob"]) and c["seconds"] >= 0
        assert c["text"].endswith("=") == (c["stop"] == "stop_string") and "=" not in c["text"][:-1]
        if c["stop"] == "length":
            assert c["tokens"] == 9
    shown = capsys.readouterr().err
    assert "compiling" in shown and "generating" in shown and "100%" in shown and "tokens/s" in shown


def test_impossible_arguments_are_named(tmp_path, capsys):
    prompts = write(tmp_path / "p.jsonl", '{"prompt": "a"}\n')
    arguments = [f"--model={TINY}", f"--prompts={prompts}", f"--out={tmp_path / 'o'}", "--mesh=data=8"]
    for change, message in (("--n=0", "--n=0"), ("--temperature=-1", "temperature=-1"), ("--mesh=data=9", "--mesh")):
        assert generate.main([*arguments, change]) == 1
        assert message in capsys.readouterr().err
    assert not (tmp_path / "o").exists()
