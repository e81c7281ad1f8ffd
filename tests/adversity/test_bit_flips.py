"""One flipped bit in any file of a run directory is detected, or the run resumes from the same bits.

The tests share one run with a batch in flight. They flip single bits in copies of it, file by file, and read the files
as a resumed run and an export do: a damaged file must be refused, or give the same bits as before. The last test
resumes a whole run.
"""

import json
import pathlib
import random
import re
import shutil

import jax
import pytest
from processes import SMALL, TWO_DEVICES, comparable, run, same_end

from podrl.export import restore_params
from podrl.rundir import identity
from podrl.rundir.metrics import LogConfig, MetricsLog
from podrl.storage.bits import tree_sums
from podrl.storage.checkpoint import Checkpoints, read_state
from podrl.storage.record import CheckpointRecord
from podrl.storage.seal import array_digest

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.nightly("podrl/storage"),
    # Orbax abandons its reads of a damaged checkpoint; they end later, in threads of their own.
    pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning"),
]
STEPS = 4
JOB = (
    *SMALL,
    *(f"--config.trainer.max_steps={STEPS}", "--config.checkpoint.every=1", "--config.eval.problems=4"),
    *("--config.model.lora.rank=4", "--config.grpo.max_staleness=1", "--config.log.to=tensorboard"),
    *("--config.checkpoint.keep=3", TWO_DEVICES),
)
NEWEST = str(STEPS)
WITH_PENDING = str(STEPS - 1)  # this checkpoint also holds the last step's batch
# Only people read these files; a resumed run replaces them, or writes other files beside them.
_UNREAD = ("about.json", "defaults.json", "files.json", "report.html", "spans.jsonl", "summary.json")
_UNREAD += ("tensorboard/", "trace/")


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> pathlib.Path:
    return run(tmp_path_factory.mktemp("whole") / "run", base=JOB).workdir


def _files(directory: pathlib.Path) -> list[str]:
    return sorted(str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file())


def flip(file: pathlib.Path, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def _bits(file: pathlib.Path, count: int) -> list[int]:
    """Chooses the first and the last bit of a file, and `count` random bits."""
    bits = 8 * file.stat().st_size
    rng = random.Random(file.name)
    some = {0, bits - 1, *(rng.randrange(bits) for _ in range(count))} if bits else set()
    return sorted(some)


def _content(restored) -> tuple:
    arrays = {name: array_digest(x) for name, x in restored.arrays.items()}
    return tree_sums(restored.state), json.dumps(restored.host, sort_keys=True), arrays


def _abstract(checkpoint: pathlib.Path):
    _, state = read_state(checkpoint.parent, int(checkpoint.name))
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), state)


@pytest.mark.parametrize("step", [WITH_PENDING, NEWEST])
def test_every_file_of_a_checkpoint(whole, tmp_path, step):
    workdir = tmp_path / "run"
    shutil.copytree(whole, workdir)
    folder = workdir / "checkpoints" / step
    abstract = _abstract(folder)
    expected = _content(Checkpoints(folder.parent).restore(int(step), abstract))
    assert bool(expected[2]) == (step == WITH_PENDING), "a batch in flight is in this checkpoint, and in no other"
    found = {"refused": 0, "same": 0}
    for name in _files(folder):
        for bit in _bits(folder / name, 4):
            flip(folder / name, bit)
            checkpoints = Checkpoints(folder.parent, keep=9)
            try:
                same = _content(checkpoints.restore(int(step), abstract)) == expected
                assert same, f"bit {bit} of {name}: restore() returned other content and raised no error"
                found["same"] += 1
            except (ValueError, OSError):
                found["refused"] += 1
            finally:
                checkpoints.close()
            flip(folder / name, bit)
    assert found["refused"] > 20, found
    assert _content(Checkpoints(folder.parent).restore(int(step), abstract)) == expected


def test_an_export_of_a_damaged_checkpoint_takes_the_one_before(whole, tmp_path, caplog):
    """Flips bits of every data file of the newest checkpoint. An export reads only the adapters, so damage
    elsewhere does not matter to it."""
    workdir = tmp_path / "run"
    shutil.copytree(whole, workdir)
    folder = workdir / "checkpoints" / NEWEST
    abstract = _abstract(folder)["params"]
    sums = {s: tree_sums(restore_params(workdir, s, abstract)[1]) for s in (STEPS, STEPS - 1)}
    assert sums[STEPS] != sums[STEPS - 1]
    taken = []
    for name in _files(folder / "state"):
        for bit in _bits(folder / "state" / name, 3):
            flip(folder / "state" / name, bit)
            step, params = restore_params(workdir, None, abstract)
            assert tree_sums(params) == sums[step], f"bit {bit} of {name}"
            taken.append(step)
            flip(folder / "state" / name, bit)
    assert set(taken) == {STEPS, STEPS - 1} and "cannot be read" in caplog.text
    host = folder / "host" / "metadata"
    flip(host, 8 * host.stat().st_size // 2)
    with pytest.raises(ValueError, match="host data"):
        restore_params(workdir, STEPS, abstract)
    assert restore_params(workdir, None, abstract)[0] == STEPS - 1


def test_the_configuration(whole, tmp_path):
    """Flips bits of config.json: a resumed run still reads the configuration with which the run was started."""
    workdir = tmp_path / "run"
    shutil.copytree(whole, workdir)
    path, checkpoints = workdir / "config.json", workdir / "checkpoints"
    expected = identity.read(workdir, checkpoints)
    assert expected is not None and expected == CheckpointRecord.read(checkpoints / NEWEST).config
    for bit in _bits(path, 400):
        flip(path, bit)
        assert identity.read(workdir, checkpoints) == expected, f"bit {bit}"
        flip(path, bit)


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
def test_metrics_and_samples(whole, tmp_path, name):
    """Flips bits of lines that the checkpoint counts: a message says that the file differs from what was written."""
    marks = CheckpointRecord.read(whole / "checkpoints" / NEWEST).content["files"]
    bits = [bit for bit in _bits(whole / name, 200) if bit < 8 * marks[name]["size"]]
    assert len(bits) > 50
    for bit in (None, *bits):
        shutil.copy(whole / name, tmp_path / name)
        if bit is not None:
            flip(tmp_path / name, bit)
        log = MetricsLog(tmp_path, LogConfig(to=()), start=STEPS + 1, run_config={}, marks=marks)
        log.close()
        said = any(text.startswith(f"{name} is not what this run wrote") for text in log.problems)
        assert said == (bit is not None), f"bit {bit}"


def test_runs_resumed_with_a_flipped_bit_in_every_other_file_and_in_the_newest_checkpoint(whole, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(whole, workdir)
    others = [name for name in _files(workdir) if not name.startswith("checkpoints/")]
    files = {"metrics.jsonl", "samples.jsonl", "config.json", "starts.jsonl"}
    files |= {f"evaluations/{step}.json" for step in (0, STEPS)}
    assert {name for name in others if not name.startswith(_UNREAD)} == files
    for name in others:
        content = (workdir / name).read_bytes()
        places = [found.end() - 1 for found in re.finditer(rb"\.\d+", content)]  # a digit changes, JSON stays valid
        flip(workdir / name, 8 * (places or range(len(content)))[len(places or content) // 4])
    data = max((workdir / "checkpoints" / NEWEST / "state").rglob("*"), key=lambda p: p.stat().st_size)
    flip(data, 8 * data.stat().st_size // 2)
    resumed = run(workdir, base=JOB)
    assert f"checkpoints/{NEWEST} cannot be read" in resumed.stderr and "Traceback" not in resumed.stderr
    assert "config.json is damaged" in resumed.stderr and "its copy in the checkpoint" in resumed.stderr
    assert f"Resumed after step {STEPS - 1}" in resumed.stdout
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert f"{name} is not what this run wrote" in resumed.stdout
    assert comparable(workdir)[-1] == comparable(whole)[-1]
    for name in ("metrics.jsonl", "samples.jsonl"):  # a resume does not write lost lines of earlier steps again
        shutil.copy(whole / name, workdir / name)
    same_end(workdir, whole)
