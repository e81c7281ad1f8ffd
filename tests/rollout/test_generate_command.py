import datetime
import decimal
import json
import math
import os
import pathlib
import re
import subprocess
import sys

import pytest

import podrl
from podrl import generate
from podrl.data.tokenizer import Tokenizer
from podrl.storage import hub

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
        (b'{"prompt": "a"}\n{"prompt": \n', "p.jsonl line 2 is not JSON"),
        (b'{"text": "a"}\n', "line 1 has text: it must hold 'question', 'prompt' or 'messages'.*by --question_field"),
        (b'{"prompt": 3}\n', "line 1: 'prompt' is 3 but must be text"),
        (b'{"messages": [{"role": "user"}]}\n', "line 1: 'messages' must be a list of objects with the texts"),
        (b'{"prompt": "a"}\n{"prompt": "\xff"}\n', "line 2 is not UTF-8"),
        (b"\n", "is empty"),
    ],
)
def test_bad_files_are_named(tmp_path, text, message):
    (tmp_path / "p.jsonl").write_bytes(text)
    with pytest.raises(ValueError, match=message):
        generate.read_prompts(tmp_path / "p.jsonl")


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
    records = [json.loads(line) for line in out.read_text().split("\n")[:-1]]
    assert [(r["index"], r["id"]) for r in records] == [(0, "a"), (1, "b"), (2, "c")]
    completions = [c for r in records for c in r["completions"]]
    assert len(completions) == 9
    for c in completions:
        assert 1 <= c["tokens"] <= 9 and c["logprob"] < 0 and math.isfinite(c["logprob"]) and c["seconds"] >= 0
        assert c["text"].endswith("=") == (c["stop"] == "stop_string") and "=" not in c["text"][:-1]
        if c["stop"] == "length":
            assert c["tokens"] == 9
    shown = capsys.readouterr().err
    assert "rollout: preparing program 1/" in shown and "generating 9/9" in shown and "tokens/s" in shown
    assert sorted(file.name for file in tmp_path.iterdir()) == ["o.jsonl", "p.jsonl"]
    _goes_on_after_a_kill(tmp_path, arguments, records)


def _goes_on_after_a_kill(tmp_path, arguments, records):
    """Resumes from a file with one finished prompt and a torn line. The command completes the other prompts with the
    same texts as in the first run."""
    out = tmp_path / "o.jsonl"
    args = generate._parser().parse_args(arguments)
    half = generate.OutputFile(out, generate._settings(args, generate.read_prompts(args.prompts)), args.n)
    kept = records[1] | {"id": "kept"}
    half.add(1, kept)
    with half.partial.open("ab") as torn:
        torn.write(b'0\t{"index": 0, "comple')
    out.unlink()
    assert generate.main([*arguments, "--n=2"]) == 1
    assert not out.exists()
    assert generate.main(arguments) == 0
    again = [json.loads(line) for line in out.read_text().split("\n")[:-1]]
    texts = [[c["text"] for c in record["completions"]] for record in again]
    assert again[1] == kept and texts == [[c["text"] for c in record["completions"]] for record in records]


_COUNTED = """
import sys
import jax
from podrl import generate
misses = []
jax.monitoring.register_event_listener(lambda name, **_: misses.extend([name] * name.endswith("/cache_misses")))
assert generate.main(sys.argv[1:]) == 0
print(len(misses))
"""


def test_the_second_command_for_a_model_compiles_nothing(tmp_path):
    prompts = write(tmp_path / "p.jsonl", '{"prompt": "a"}\n')
    command = [sys.executable, "-c", _COUNTED, f"--model={TINY}", f"--prompts={prompts}", f"--out={tmp_path / 'o'}"]
    own = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    misses, said = [], []
    for number in ("--seed=1", "--seed=2"):
        done = subprocess.run(
            [*command, "--max_new=4", number], env=os.environ | own, capture_output=True, text=True, check=True
        )
        misses.append(int(done.stdout))
        (counts,) = re.findall(r"rollout: ready .* \((\d+) compiled, (\d+) from the cache\)", done.stderr)
        said.append(counts)
    assert misses[0] >= 5 and misses[1] == 0
    assert said[1] == ("0", str(sum(map(int, said[0])))) and int(said[0][0]) >= 5


def test_an_agent_program_completes_prompts(tmp_path, capsys, monkeypatch):
    pytest.importorskip("httptools", reason="needs the extra [agents]")
    monkeypatch.setenv("PYTHONPATH", str(pathlib.Path(generate.__file__).parent.parent))
    prompts = write(tmp_path / "p.jsonl", '{"question": "What is 3+4?", "answer": "7"}\n')
    arguments = ["--model=tiny_tools", f"--prompts={prompts}", f"--out={tmp_path}/o.jsonl", "--n=2", "--max_new=40"]
    arguments += ["--max_response=120", "--program=python -m podrl.environments.sums_agent"]
    assert generate.main(arguments) == 0, capsys.readouterr().err
    completions = json.loads((tmp_path / "o.jsonl").read_text())["completions"]
    assert len(completions) == 2
    for one in completions:
        assert one["metrics"]["failed/agent"] == 0 and one["metrics"]["chat_requests"] >= 1 and one["turns"]
    assert generate.main([*arguments, "--tool=calculator"]) == 1
    assert "a program brings its own tools" in capsys.readouterr().err


def test_other_prompts_to_the_same_model_need_no_other_programs():
    """Programs are compiled for padded prompt lengths and numbers of lanes, which both have few values."""
    asked = [(longest, samples) for longest in range(1, 257) for samples in range(1, 300, 7)]
    assert {generate.sizes(*each, 128) for each in asked} == {(64 * p, n) for p in (1, 4) for n in (8, 32, 128)}
    for longest, samples in ((1, 1), (64, 8), (65, 9), (256, 32), (257, 33), (5000, 1000)):
        prompt, lanes = generate.sizes(longest, samples, 128)
        assert longest <= prompt < longest + 256 and min(samples, 128) <= lanes <= max(8, 4 * samples)
    assert generate.sizes(10, 100, 5) == (64, 5)


def test_impossible_arguments_are_named(tmp_path, capsys):
    prompts = write(tmp_path / "p.jsonl", '{"prompt": "a"}\n')
    arguments = [f"--model={TINY}", f"--prompts={prompts}", f"--out={tmp_path / 'o'}", "--mesh=data=8"]
    changes = {"--n=0": "--n=0", "--temperature=-1": "temperature=-1", "--mesh=data=9": "--mesh"}
    for change, message in {**changes, "--top_p=3": "error: --top_p=3.0 must be"}.items():
        assert generate.main([*arguments, change]) == 1
        assert message in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_records_keep_a_field_named_index(tmp_path):
    """Records are told apart by their place in the file, not by their content, also when a command is resumed."""
    records = [{"index": 7, "question": name, "completions": []} for name in "abc"]
    output = generate.OutputFile(tmp_path / "o", {}, 1)
    output.add(2, records[2])
    output.add(0, records[0])
    again = generate.OutputFile(tmp_path / "o", {}, 1)
    assert sorted(again.done) == [0, 2]
    again.add(1, records[1])
    again.finish()
    assert [json.loads(line) for line in (tmp_path / "o").read_text().splitlines()] == records


def test_a_field_that_the_output_would_replace_is_refused(tmp_path):
    prompts = write(tmp_path / "p.jsonl", '{"prompt": "a", "completions": ["b"]}\n')
    with pytest.raises(ValueError, match=r"p.jsonl line 1 has a field 'completions'.*rename it"):
        generate.read_prompts(prompts)


def test_every_flipped_bit_of_an_unfinished_output_is_noticed_or_harmless(tmp_path, capsys):
    records, path = [{"text": f"{name} é"} for name in "abc"], tmp_path / "o.partial"
    output = generate.OutputFile(tmp_path / "o", {"n": 1}, 1)
    for index, record in enumerate(records):
        output.add(index, record)
    content = path.read_bytes()
    for place in range(len(content)):
        for bit in range(8):
            path.write_bytes(content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :])
            try:
                again = generate.OutputFile(tmp_path / "o", {"n": 1}, 1)
            except ValueError as error:
                assert "o.partial" in str(error) and place < content.index(b"\n") + 1
                continue
            damaged = path.read_bytes()
            kept = {index: json.loads(damaged[start : start + size]) for index, (start, size) in again.done.items()}
            assert all(records[index] == record for index, record in kept.items())
            said = "is damaged" in capsys.readouterr().err
            # A last line without its newline counts as incomplete, not as damaged.
            assert said == (len(kept) < 3) or place == len(content) - 1


def test_an_unfinished_output_of_another_version_is_made_again(tmp_path, capsys):
    (tmp_path / "o.partial").write_text('{"podrl.generate": {}}\n0\t{"index": 0}\n{"index": 1}\n')
    assert not generate.OutputFile(tmp_path / "o", {}, 1).done
    assert capsys.readouterr().err.count("of another version") == 2


def test_the_prompts_are_never_overwritten(tmp_path, capsys):
    prompts = write(tmp_path / "p.jsonl", '{"prompt": "a"}\n')
    (tmp_path / "link.jsonl").symlink_to(prompts)
    (tmp_path / "hard.jsonl").hardlink_to(prompts)
    for out in ("p.jsonl", "link.jsonl", "hard.jsonl", "../" + tmp_path.name + "/p.jsonl"):
        assert generate.main([f"--model={TINY}", f"--prompts={prompts}", f"--out={tmp_path / out}"]) == 1
        assert "is the file of --prompts" in capsys.readouterr().err
    assert prompts.read_text() == '{"prompt": "a"}\n'


def test_columns_of_a_table_are_written_as_json(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    when, cost = datetime.datetime(2024, 5, 1), decimal.Decimal("1.50")
    table = {"prompt": ["9"], "when": [when], "cost": [cost], "raw": [b"text"], "more": [{"day": when.date()}]}
    parquet.write_table(pyarrow.table(table), tmp_path / "p.parquet")
    arguments = [f"--model={TINY}", f"--prompts={tmp_path / 'p.parquet'}", f"--out={tmp_path / 'o.jsonl'}"]
    assert generate.main([*arguments, "--max_new=1"]) == 0
    (found,) = map(json.loads, (tmp_path / "o.jsonl").read_text().splitlines())
    assert (found["when"], found["cost"], found["raw"]) == ("2024-05-01T00:00:00", 1.5, "text")
    assert found["more"] == {"day": "2024-05-01"}
    parquet.write_table(pyarrow.table({"prompt": ["9"], "image": [{"bytes": b"\xff\x00"}]}), tmp_path / "p.parquet")
    with pytest.raises(ValueError, match=r"p\.parquet row 0: the field 'image' is .*, which JSON does not hold"):
        generate.read_prompts(tmp_path / "p.parquet")


def test_a_damaged_prompts_file_of_a_model_is_named(tmp_path):
    (tmp_path / "prompts.json").write_text("[]")
    with pytest.raises(ValueError, match=r"prompts\.json holds a list, not an object"):
        generate.prompt_settings_of(tmp_path)
    (tmp_path / "prompts.json").unlink()
    assert generate.prompt_settings_of(tmp_path) == {}


def test_the_environment_of_completions_follows_history():
    """With --history=append, completions of a program have the branches that training has with env.history='append'."""
    arguments = ["--model=tiny_tools", "--prompts=p", "--out=o", "--tool=calculator", "--history=append"]
    config = generate._environment(generate._parser().parse_args(arguments))
    with generate._env_client(config, Tokenizer.load(str(hub.local("tiny_tools")))) as client:
        assert client.history == "append"
