"""Supervised fine-tuning: its dry run, and short runs of all parameters and of adapters."""

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from podrl.job import job
from podrl.job.config import complete
from podrl.launch import find_config, load_config
from podrl.rundir.metrics import read_metrics
from podrl.runtime.watchdog import EXIT_DONE
from podrl.storage.checkpoint import read_state

pytestmark = pytest.mark.usefixtures("quick_compilation")


def configured(**changes):
    """Completes the shipped configuration with changes, as the launcher does."""
    values = load_config(find_config("sft_tiny.py")).to_dict()
    for group, fields in changes.items():
        values[group] = values.get(group, {}) | fields
    return ConfigDict(complete(values)).to_dict()


def test_a_dry_run_tells_the_roles_and_the_arithmetic(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert job.dry_run(configured(trainer={"max_steps": 10}), "runs/x") == EXIT_DONE
    text = " ".join(capsys.readouterr().out.split())
    for part in (
        "Algorithm sft: mean of -log p",
        "Roles",
        "fsdp=8",
        "Batch arithmetic",
        "sft.batch_size",
        "640",
        "all parameters",
    ):
        assert part in text, part
    assert list(tmp_path.iterdir()) == []


def test_the_likelihood_is_that_of_the_distribution_itself_unless_the_configuration_says_otherwise():
    assert complete({"algorithm": "sft"})["rollout"]["temperature"] == 1.0
    assert configured()["rollout"]["temperature"] == 0.9


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"path": "/nowhere"}}, "model.path='/nowhere' is not a directory"),
        ({"model": {"lora": {"rank": 4}}}, r"model\.lora\.rank=4 with model\.path='scratch'"),
        ({"trainer": {"max_steps": None}}, "max_steps"),
        ({"reward": {"fns": ("answer",)}}, r"config\.reward means nothing with algorithm=sft.*--config=sft_tiny\.py"),
        ({"trainer": {"mini_batch_size": 8}}, r"mini_batch_size=8 means nothing .* set sft\.batch_size=64 "),
        ({"grpo": {"beta": 0.1}}, r"config has no key 'grpo'"),
        ({"roles": {"critic": {"mesh": "fsdp=2"}}}, r"roles\.critic\.mesh='fsdp=2'.*supervised training"),
    ],
)
def test_a_dry_run_refuses_what_a_run_would(changes, message):
    with pytest.raises(ValueError, match=message):
        job.dry_run(configured(**changes), "runs/x")


@pytest.mark.parametrize("rank", [0, 2], ids=["full", "lora"])
def test_a_short_run_learns(rank, tmp_path):
    lora = {"rank": rank, "alpha": 4.0}
    values = configured(
        model={"path": "tiny", "lora": lora},
        roles={"colocated": False, "trainer": {"mesh": "fsdp=1"}, "rollout": {"mesh": "data=7"}},
        sft={"batch_size": 8, "tagged_share": 1.0, "full_steps": 0},
        trainer={"max_steps": 3, "schedule": "constant", "warmup_fraction": 0.0, "learning_rate": 1e-2},
        eval={"problems": 0},
        checkpoint={"every": 1, "keep": 3},
        log={"to": ()},
    )
    assert job.run(values, str(tmp_path / "run"), command="again") == EXIT_DONE
    records = [r for r in read_metrics(tmp_path / "run") if "time/step" in r]
    assert [r["step"] for r in records] == [1, 2, 3]
    assert all(np.isfinite(r["sft/loss"]) and r["actor/grad_norm"] > 0 for r in records)
    first, last = (read_state(tmp_path / "run" / "checkpoints", step)[1]["params"] for step in (1, 3))
    names = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(last)}
    assert all(("lora" in name) == bool(rank) for name in names), names
    assert not all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(last), strict=True))
