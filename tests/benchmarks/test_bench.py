"""The benchmarks run and count correctly, at sizes that take seconds; no test measures time."""

import importlib.util
import json
import math
import os

import numpy as np
import pytest

from benchmarks import __main__ as bench
from benchmarks import decode as bench_decode
from benchmarks import growth
from benchmarks import trace as bench_trace
from podrl.mesh.chips import CHIPS
from podrl.plan import chips

TINY = (
    "--layers=1 --dim=16 --ffn=16 --heads=2 --kv_heads=1 --head_dim=8 --vocab=16 --mesh=data=1 --prompts=3 --group=2 "
    "--prompt_len=3:9 --max_new=10 --lanes=4 --page_tokens=8 --prefill_tokens=8 --repeats=1"
)


def test_rollout(capsys):
    assert bench.main(["benchmarks", "rollout", *TINY.split(), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert 6 <= figures["tokens"] <= 60
    assert figures["tok_s"] == pytest.approx(figures["tokens"] / figures["seconds"])
    assert figures["compiles"] == 0 and figures["spills"] == 0
    assert 0 < figures["lane_utilisation"] <= 1 and figures["peak_bytes"] > 0
    assert figures["decode_steps"] <= 8 * figures["dispatches"]
    # Each prompt is prefilled once, without its last token.
    lengths = np.random.default_rng(0)
    lengths.integers(2, 16, (3, 9))
    assert figures["prefill_tokens"] == (lengths.integers(3, 10, 3) - 1).sum()


def test_tail(capsys):
    """Windows take fewer decode steps than whole batches, but no fewer than 90 % of the simulated number without
    dispatches."""
    options = "--tail --staleness=2 --prompts=2 --group=8 --max_new=256 --lanes=8 --page_tokens=32"
    assert bench.main(["benchmarks", "rollout", *TINY.split(), *options.split(), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["samples"] == 16 and figures["lanes"] == 8 and 0 < figures["mixed_samples"] < 1
    assert figures["decode_steps"] >= 0.9 * figures["bound_decode_steps"]
    assert figures["fewer_steps"] > 1 and figures["bound_fewer_steps"] > 1
    assert figures["prefill_tokens"] > figures["prefill_tokens_whole"]
    assert all(figures[f"{kind}_cpu_s{which}"] > 0 for kind in ("window", "predicted") for which in ("", "_whole"))


def test_tools(capsys):
    options = "--calls=2 --given=5 --max_new=9 --delay_ms=20 --prompt_len=9"
    assert bench.main(["benchmarks", "tools", *TINY.split(), *options.split(), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["calls"] == 12 and figures["given_tokens"] == 60
    assert figures["tokens"] == 54, "six samples of nine tokens each"
    assert figures["prefill_per_given"] == 1 and 0 < figures["lane_utilisation"] <= 1
    assert figures["of_plain"] > 0 and figures["cpu_of_context"] > 0 and figures["compiles"] == 0


def test_slow_calls_are_hidden_by_an_update_that_is_longer_than_any_window(capsys):
    options = "--calls=2 --given=5 --max_new=9 --slow=0.3 --delay_ms=1 --update_ms=100000 --staleness=2"
    assert bench.main(["benchmarks", "tools", *TINY.split(), *options.split(), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["step_seconds"] == figures["step_seconds_whole"] == 100 and figures["faster"] == 1
    assert 0 < figures["lane_utilisation"] <= 1 and 0 < figures["lane_utilisation_whole"] <= 1


@pytest.mark.nightly("benchmarks", "podrl/environments", "podrl/rollout")
@pytest.mark.slow
def test_agents(capsys):
    pytest.importorskip("httptools", reason="needs the extra [agents]")
    small = "--prompts=1 --group=2 --episodes=2 --slow_s=0 --max_new=4"
    assert bench.main(["benchmarks", "agents", *small.split(), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["prefilled_say"] == figures["prompt_tokens"] - 1 <= figures["prefilled_chat"]
    assert figures["episodes"] == 2 and figures["answers"] == 6


@pytest.mark.nightly("benchmarks/front.py")
def test_front(capsys):
    pytest.importorskip("httptools", reason="needs the extra [agents]")
    assert bench.main(["benchmarks", "front", "--open=2", "--requests=2", "--turns=2", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert 0 < figures["server_cpu_ms_least"] <= figures["server_cpu_ms"] and figures["closing_cpu_ms_least"] > 0
    assert 8_000 < figures["request_bytes"] < 16_000, (
        "a request has a system prompt and messages of 1 to 2 kB for two turns"
    )


def test_a_leader_exchanges_a_few_messages_with_every_host(capsys):
    small = "--trainers=4 --rollouts=8 --steps=2 --processes=2 --tokens=8 --generate_s=0 --update_s=0"
    assert bench.main(["benchmarks", "pod", *small.split(), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["samples"] == 32 * 8 and figures["leader_cpu_ms"] > 0 and figures["added_ms"] > 0
    # Messages of each rollout host: its part of a batch, the batch's groups, an acknowledgement, a header with texts,
    # rows, and at times the records that it has read. Messages of each trainer host: a request and its answer.
    assert 8 * 10 + 3 * 4 <= figures["messages"] <= 8 * 13 + 3 * 4


def test_step(capsys):
    options = (
        "--layers=1 --dim=16 --ffn=16 --heads=2 --kv_heads=1 --head_dim=8 --vocab=16 --src=data=1 --prompts=3 "
        "--group=2 --prompt_len=3:9 --completion_len=1:10 --steps=2"
    )
    assert bench.main(["benchmarks", "step", *options.split(), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert 0 < figures["completion_tokens_per_second"] < figures["tokens_per_second"]
    assert figures["seconds"] > 0 and figures["logprob_seconds"] > 0 and figures["cpu_seconds"] > 0
    assert 0 <= figures["padding_share"] < 1
    assert figures["mfu"] > 0 and figures["matmul_flops"] > 0 and figures["peak_bytes"] > 0
    assert figures["compiles"] == 0


def test_an_unknown_benchmark_and_a_bad_mesh_are_named(capsys):
    assert bench.main(["benchmarks", "rolout"]) == 1
    assert "rollout" in capsys.readouterr().err
    assert bench.main(["benchmarks", "rollout", "--mesh=data=999"]) == 1
    assert "--mesh" in capsys.readouterr().err


def test_the_reads_that_decode_counts(tiny_engine):
    reads, tokens = bench_decode._filled(tiny_engine, 9, 12, 2)
    # 4 lanes in groups of 2: 8 prompt tokens take one page per group, 12 sampled tokens two pages per lane.
    assert tokens == 2 * 8 + 4 * 12
    np.testing.assert_array_equal(reads.total_2, [2, 8])
    np.testing.assert_array_equal(reads.longest_2, [1, 2])
    assert reads.own_count_O[:2].tolist() == [8, 4] and reads.own_start_O[:2].tolist() == [8, 16]


# A loop of decode steps, each with one sum of 4 x 4 floats over two chips; one gather per dispatch precedes it.
DECODE = """HloModule jit_generate, is_scheduled=true, num_partitions=2

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

%body (state: (f32[4,4])) -> (f32[4,4]) {
  %state = (f32[4,4]{1,0}) parameter(0)
  %x = f32[4,4]{1,0} get-tuple-element(%state), index=0
  %y = f32[4,4]{1,0} all-reduce(%x), channel_id=1, replica_groups={{0,1}}, to_apply=%sum
  ROOT %next = (f32[4,4]{1,0}) tuple(%y)
}

%condition (state: (f32[4,4])) -> pred[] {
  %state.1 = (f32[4,4]{1,0}) parameter(0)
  ROOT %more = pred[] constant(true)
}

ENTRY %main (part: f32[2,4]) -> (f32[4,4]) {
  %part = f32[2,4]{1,0} parameter(0)
  %whole = f32[4,4]{1,0} all-gather(%part), channel_id=2, replica_groups={{0,1}}, dimensions={0}
  %first = (f32[4,4]{1,0}) tuple(%whole)
  ROOT %loop = (f32[4,4]{1,0}) while(%first), condition=%condition, body=%body, metadata={op_name="jit(f)/decode_steps/while"}
}
"""  # noqa: E501 - compiled text has long lines


def test_the_collectives_of_a_decode_step(tiny_engine):
    args, steps = bench_decode._parser().parse_args(["--prompt_len=9", "--group=2"]), tiny_engine.shape.steps
    found = bench_decode._count(tiny_engine, DECODE, 100.0, 1.0, 12, args, CHIPS["v5e"])
    gathered = {"count": 1 / steps, "bytes": 32 / steps}
    assert found["collectives"] == {"all-gather": gathered, "all-reduce": {"count": 1, "bytes": 64}}
    assert found["sent_bytes"] == 64 + 32 / steps
    assert found["sent_least_ms"] == pytest.approx(1e3 * found["sent_bytes"] / 200e9)


@pytest.fixture
def tiny_engine():
    import jax

    from podrl.engine.config import RolloutConfig
    from podrl.engine.engine import Engine
    from podrl.engine.sizes import engine_shape
    from podrl.mesh.build import make_mesh
    from podrl.models.config import gemma2_config

    model = gemma2_config(
        vocab_size=16, num_layers=1, model_dim=16, ffn_dim=16, num_heads=2, num_kv_heads=1, head_dim=8
    )
    config = RolloutConfig(lanes=4, max_prompt_length=9, max_tokens_to_generate=20, page_tokens=8, prefill_tokens=8)
    return Engine(model, make_mesh("data=1", jax.devices()[:1]), engine_shape(config, 1), np.dtype("float32"))


@pytest.mark.nightly("benchmarks", "podrl/plan", "podrl/models", "podrl/trainer", "podrl/engine/engine.py")
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the extra [tpu]")
def test_a_decode_step_of_gemma2_2b_reads_little_more_than_it_must(monkeypatch):
    env = dict(os.environ)
    chips.prepare(env)
    for name, value in env.items():  # monkeypatch restores the variables that `prepare` sets
        monkeypatch.setenv(name, value)
    figures = bench_decode.run(["--lanes=256", "--prompt_len=512", "--max_new=1536"])
    assert figures["fits"] and figures["peak_bytes"] < 16 * 2**30
    assert [step["sampled"] for step in figures["steps"]] == [0, 384, 768, 1152, 1528]
    for step in figures["steps"]:
        assert 1 <= step["ratio"] <= 1.25, step
        # Twice in each layer, after attention and after the last product, the outputs of a chip's 128 lanes are summed
        # over four chips, in bfloat16.
        sums, each = step["collectives"]["all-reduce"], 128 * 2304 * 2 * 2 * 3 / 4
        assert sums["count"] >= 2 * 26 and sums["bytes"] >= 2 * 26 * each, sums
        assert step["sent_bytes"] == pytest.approx(sum(c["bytes"] for c in step["collectives"].values()))


def test_the_cost_of_a_trace_is_that_over_its_neighbours():
    seconds = {1: 9.0, 2: 5.0, 3: 1.0, 4: 1.5, 5: 1.0, 6: 1.7, 7: 1.2, 8: 3.0, 9: 1.0}
    found = bench_trace.figures(seconds)
    assert found["steps"] == 2 and found["traced_step_s"] == pytest.approx(1.6), (
        "the last step does not count, because it saves a checkpoint"
    )
    assert found["traced_step_cost_s"] == pytest.approx(0.55) and found["step_s"] == 1.0
    assert found["cost"] == pytest.approx(0.055)


@pytest.mark.nightly("benchmarks", "podrl/rundir/trace.py")
@pytest.mark.slow
def test_trace(capsys):
    small = ("rollout.prompts_per_step=2", "grpo.num_generations=2", "log.to=()")
    sets = [f"--set={each}" for each in small]
    assert bench.main(["benchmarks", "trace", "--steps=7", *sets, "--json"]) == 0, capsys.readouterr().err
    figures = json.loads(capsys.readouterr().out)
    assert figures["steps"] >= 1 and figures["bytes_per_traced_step"] > 500 and figures["span_bytes_per_step"] > 100


SEQ = (
    "--layers=1 --dim=16 --ffn=16 --heads=2 --kv_heads=2 --head_dim=8 --vocab=16 --prompts=2 --group=2 --prompt_len=8 "
    "--completion_len=56 --share_prompts=no --max_tokens_per_row=64 --remat=none"
)


def test_a_step_with_rows_cut_along_time_is_counted_beside_one_without(capsys):
    assert bench.main(["benchmarks", "step", *SEQ.split(), "--src=fsdp=4", "--seq=2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["mesh"], found["seq_mesh"]) == (
        "data=1,expert=1,fsdp=4,seq=1,tensor=1",
        "data=1,expert=1,fsdp=2,seq=2,tensor=1",
    )
    assert (found["tokens_per_row"], found["seq_tokens_per_row"]) == (64, 64)
    # All-to-all between heads and time: queries, keys and values go one way, the result comes back.
    exchanged = found["seq_counted_collectives"]["all-to-all"]
    own = found["counted_collectives"].get("all-to-all", {"bytes": 0.0})
    assert exchanged["count"] >= 8 and exchanged["bytes"] > own["bytes"]
    assert found["counted_hbm_ratio"] == found["seq_counted_hbm_bytes"] / found["counted_hbm_bytes"]
    assert found["counted_sent_bytes"] == sum(c["bytes"] for c in found["counted_collectives"].values())
    assert found["peak_bytes"] > 0 and found["seq_peak_bytes"] > 0


def test_a_seq_that_does_not_divide_is_refused(capsys):
    assert bench.main(["benchmarks", "step", *SEQ.split(), "--src=fsdp=4", "--seq=3"]) == 1
    assert "--seq=3 must be at least 2 and divide the fsdp of --src=fsdp=4" in capsys.readouterr().err


def test_growth_compares_exponents_of_cost_and_of_work():
    points = [(n, 3.0 * n**1.5, 7.0 * n**1.5) for n in (10, 100, 1000)]
    found = growth.exponents([(1, 90.0, 7.0), *points])  # the smallest sizes are not fitted
    assert found == pytest.approx({"cost_by_size": 1.5, "work_by_size": 1.5, "cost_by_work": 1.0})
    same = growth.exponents([(n, 2.0, 5.0) for n in (16, 32, 64, 128)])
    assert same["cost_by_size"] == pytest.approx(0.0) and math.isnan(same["cost_by_work"])


def test_growth_measures_the_start_of_a_job(capsys):
    assert bench.main(["benchmarks", "growth", "--records=20", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["records"] == 20 and figures["cpu_seconds"] > 0
