import pathlib

import pytest

from podrl import generate


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
