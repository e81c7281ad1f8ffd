"""benchmarks.on_chip, which measures on a chip for an hour: results survive a stop and a failure, and a table describes
them."""

import json

import pytest

from benchmarks import __main__ as bench
from benchmarks import chip_table, grpo, on_chip
from benchmarks.rollout import least_bytes
from podrl.data.tokenizer import Tokenizer

DEVICE = {
    "platform": "tpu",
    "kind": "TPU v5 lite",
    "devices": 1,
    "jax": "0",
    "topology": "v5e:1x1",
    "memory_bytes": 15 << 30,
    "matmul_flops": 98.5e12,
    "matmul_flops_f32": 10e12,
    "peak_flops": 197e12,
    "hbm_rate": 700e9,
    "hbm_rate_vendor": 819e9,
    "launch_us": 50.0,
}


class Clock:
    """A clock that the test moves."""

    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def host(tmp_path, monkeypatch):
    """Stands in for a host on which every part takes a minute; `answers` sets the result of a part by the part's
    name."""
    clock, answers, asked = Clock(), {}, []

    def run(command, limit_s):
        asked.append((command[-1], limit_s))
        clock.now += 60
        return answers.get(command[-1], {"figures": {"of": command[-1]}})

    monkeypatch.setattr(on_chip, "_run", run)
    made = on_chip.Host(tmp_path, 3.0, clock)
    made.answers, made.asked, made.place = answers, asked, tmp_path
    return made


def part(name, minutes=1.0):
    return on_chip.Part(name, ["benchmarks", name], minutes)


def test_what_does_not_fit_is_left_and_what_is_there_is_not_made_again(host):
    wanted = [part("a"), part("b"), part("long", 20), part("c"), part("d")]
    found, left = host.measure_all(wanted)
    assert list(found) == ["a", "b", "c"] and [p.name for p in left] == ["long", "d"]
    assert host.asked == [("a", 180), ("b", 120), ("c", 60)]
    again = on_chip.Host(host.place, 3.0, Clock())
    found, left = again.measure_all(wanted)
    assert host.asked[3:] == [("d", 180)]
    assert list(found) == ["a", "b", "c", "d"] and [p.name for p in left] == ["long"]


def test_a_part_that_fails_is_tried_again_by_the_next_call_and_others_go_on(host):
    host.answers["b"] = {"error": "out of memory"}
    found, _ = host.measure_all([part("a"), part("b"), part("c")])
    assert found["b"]["error"] == "out of memory" and "figures" in found["c"]
    del host.answers["b"]
    found, _ = on_chip.Host(host.place, 3.0, Clock()).measure_all([part("a"), part("b"), part("c")])
    assert "figures" in found["b"] and [name for name, _ in host.asked] == ["a", "b", "c", "b"]


def test_other_options_make_a_part_anew(host):
    host.measure(part("a"))
    host.measure(on_chip.Part("a", ["benchmarks", "other"], 1.0))
    assert [name for name, _ in host.asked] == ["a", "other"]


def test_a_process_is_ended_at_its_limit_and_its_last_lines_are_kept():
    assert "longer than the 0 s" in on_chip._run(["benchmarks", "device"], 0.0)["error"]
    assert "No module named" in on_chip._run(["benchmarks.nothing"], 60.0)["error"]


def test_small_memory_trains_adapters_and_only_tpus_are_planned(tmp_path):
    small = {p.name: p.command for p in on_chip.parts(DEVICE, tmp_path)}
    assert "--lora_rank=32" in small["grpo-S0-qwen3-0.6b"]
    assert (
        "--config.model.lora.rank=32" in small["grpo-plan-gemma3-1b"]
        and "--trainer=v5e:1x1" in small["grpo-plan-gemma3-1b"]
    )
    assert "--lora_rank=32" not in small["update-qwen3-0.6b"]
    large = {p.name: p.command for p in on_chip.parts(DEVICE | {"topology": "", "memory_bytes": 80 << 30}, tmp_path)}
    assert "--lora_rank=32" not in large["grpo-S2-qwen3-0.6b"] and "grpo-plan-qwen3-0.6b" not in large
    names = list(small)
    assert names.index("grpo-S0-qwen3-0.6b") < names.index("decode-1-gemma3-1b")


def test_bytes_of_a_generation_by_hand():
    """Two samples of a prompt of 10 tokens draw 3 tokens each: the steps read 10, 12 and 14 tokens, the prompt once."""
    figures = {"decode_steps": 3, "samples": 2, "prompt_tokens": 10, "weight_bytes": 1000, "kv_token_bytes": 5}
    assert least_bytes(figures, 1) == 3 * 1000 + (10 + 12 + 14) * 5
    assert least_bytes(figures, 2) == 3 * 1000 + (10 + 12 + 14) * 5 / 2


def test_the_table_compares_with_bounds_and_names_failures():
    decode = {"decode_steps": 100, "samples": 1, "prompt_tokens": 0, "weight_bytes": 819e6, "kv_token_bytes": 0}
    decode |= {"seconds": 0.2, "tok_s": 500.0, "lanes": 1, "host_share": 0.25, "warm_up_seconds": 30.0}
    update = {"seconds": 2.0, "mfu": 0.5, "matmul_flops": 98.5e12, "peak_flops": 197e12}
    update |= {"tokens_per_second": 1e4, "peak_bytes": 2**33}
    results = {
        "device": {"figures": DEVICE},
        "decode-1-x": {"figures": decode},
        "update-x": {"figures": update},
        "move-x": {"error": "first\nRESOURCE_EXHAUSTED | out of memory"},
    }
    text = chip_table.table(results)
    assert "| matrix products, bfloat16 | 98.5 TFLOP/s | 50% |" in text
    assert "| decode-1-x | 1 | 500 | 2 | 50% | 25% | 30 |" in text
    assert "| update-x | 2 | 0.5 | 10,000 | 50% | 25% | 8 |" in text
    assert "| move-x | failed: RESOURCE_EXHAUSTED / out of memory |" in text


def test_kernels_agree_with_their_definitions(capsys):
    tiny = "--tokens=128 --heads=2 --kv_heads=1 --window=30 --lanes=4 --pages=1 --dtype=float32"
    assert bench.main(["benchmarks", "kernels", *tiny.split(), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert set(figures) == {f"{form}_error" for form in chip_table._FORMS}
    assert figures.pop("reference_error") == 0 and all(error < 1e-5 for error in figures.values())


def test_the_sampler_agrees_with_the_trainer(capsys):
    tiny = "--layers=1 --dim=16 --ffn=16 --heads=2 --kv_heads=1 --head_dim=8 --vocab=16 --mesh=data=1 --prompts=2"
    more = "--group=2 --prompt_len=3:9 --max_new=10 --lanes=4 --page_tokens=8 --prefill_tokens=8 --embed_scale=4"
    assert bench.main(["benchmarks", "agree", *tiny.split(), *more.split(), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (
        0 < figures["entropy"] < 2.7 and figures["max"] < 1e-5 and figures["mean"] <= figures["p99"] <= figures["max"]
    )


@pytest.mark.e2e
@pytest.mark.nightly("benchmarks")
def test_the_whole_command_on_tiny_shapes(tmp_path, capsys):
    assert bench.main(["benchmarks", "on_chip", "--tiny", "--minutes=60", f"--out={tmp_path}", "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert not done["failed"] and not done["left"]
    names = ["kernels", "decode-1-tiny", "decode-4-tiny", "update-tiny", "agree-tiny", "move-tiny"]
    assert done["done"] == [*names, *(f"grpo-S{S}-tiny" for S in range(3))]
    text = (tmp_path / "chips.md").read_text()
    assert all(f"| {name} |" in text for name in done["done"]) and "failed" not in text


def test_the_job_s_tokenizer_has_an_id_for_each_row_of_a_large_vocabulary(tmp_path):
    for name, content in grpo.tokenizer_files(5000).items():
        (tmp_path / name).write_bytes(content)
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.vocab_size == 5000
    assert tokenizer.decode(tokenizer.encode("Add 3 and 4.")) == "Add 3 and 4."
