"""The reshard benchmark runs, and its figures agree with each other."""

import pytest

from benchmarks import reshard as bench_reshard

TINY = ["--layers=2", "--dim=16", "--ffn=32", "--heads=4", "--kv_heads=2", "--head_dim=8", "--vocab=32", "--repeats=3"]


@pytest.mark.parametrize("tree", [TINY, ["--leaves=3", "--leaf_shape=16x32", "--repeats=3"]])
def test_figures(tree):
    figures = bench_reshard.run([*tree, "--src=fsdp=2,tensor=2", "--dst=tensor=4"])
    assert figures["compiles_after_first"] == 0
    assert figures["bytes_moved"] == figures["target_bytes"] > 0
    assert figures["plan_cached_ms"] <= figures["plan_ms"]
    assert figures["speedup"] == pytest.approx(figures["device_put_ms"] / figures["median_ms"])
    seconds = figures["median_ms"] / 1e3
    assert figures["gb_s"] * seconds * 1e9 == pytest.approx(figures["source_bytes"] + figures["target_bytes"])


def test_impossible_meshes():
    with pytest.raises(ValueError, match=r"--dst tensor=16 needs 16 devices"):
        bench_reshard.run([*TINY, "--dst=tensor=16"])


@pytest.mark.e2e
def test_a_fake_pod():
    flags = ["--local_processes=2", "--fake_devices=2", "--src=fsdp=2", "--dst=tensor=2"]
    figures = bench_reshard.run(["--leaves=3", "--leaf_shape=16x32", "--repeats=3", *flags])
    assert figures["compiles_after_first"] == 0
    assert figures["bytes_moved"] == figures["crossing_bytes"] == 3 * 16 * 32 * 2
    assert figures["raw_share"] == pytest.approx(figures["raw_ms"] / figures["median_ms"])


def test_a_pod_that_does_not_fit_the_meshes():
    with pytest.raises(ValueError, match=r"need 4 \+ 4 devices, --local_processes=2 of --fake_devices=2 have 4"):
        bench_reshard.run(["--leaves=3", "--local_processes=2"])
