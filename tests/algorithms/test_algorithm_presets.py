"""Every preset builds, trains in the right direction, and describes itself."""

import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrl.algorithms.gae import outcome_reward
from podrl.algorithms.presets import PRESETS, preset
from podrl.testing import policy_rows


def of(reward_B, size):
    """Returns the group index of samples in groups of one size, group after group."""
    return np.arange(len(reward_B)) // size


def build(name):
    found = preset(name)
    scale = {"loss_agg_scale": 8.0} if "scale" in found.loss["loss_agg_mode"] else {}
    return found.advantage_estimator(), found.policy_loss(**scale)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_pushes_the_better_sample_up(name):
    estimator, policy_loss = build(name)
    reward_B = np.array([1.0, 0.0], np.float32)
    mask_BT = np.array([[0, 1, 1, 1], [0, 1, 1, 0]], np.float32)
    if estimator.needs_critic:
        advantage_BT = outcome_reward(reward_B, mask_BT) - 0.5 * mask_BT
    else:
        reward_BT = outcome_reward(reward_B, mask_BT)
        greedy_B = np.full(2, 0.5, np.float32)
        advantage_BT = estimator(reward_BT, greedy_B, mask_BT, group_B=of(reward_BT, 2))
    logprob_BT = jnp.full((2, 4), -1.0)
    length_BT = jnp.where(mask_BT > 0, mask_BT.sum(axis=1, keepdims=True), 1.0)

    def mean(x_BT):
        old_BT = jax.lax.stop_gradient(x_BT)
        same = dict.fromkeys(("old_logprob", "ref_logprob", "sampler_logprob"), old_BT)
        advantage = {"advantage": jnp.asarray(advantage_BT)}
        rows = policy_rows(jnp.ones((2, 4), int), jnp.asarray(mask_BT), length_BT, **same, **advantage)
        return policy_loss(x_BT, jnp.zeros((2, 4)), rows)[0].mean()

    grad_BT = np.asarray(jax.grad(mean)(logprob_BT))
    assert grad_BT[0, 3] < 0, "descent must raise the last token of the better sample"
    assert grad_BT[1, 1:3].sum() >= 0
    assert np.all(grad_BT[mask_BT == 0] == 0)


def test_numbers_of_the_papers():
    assert "clip(r, 0.8, 1.28)" in build("dapo")[1].formula()
    assert preset("dapo").learner["dynamic_sampling"]
    assert "clip(s, 0.9997, 1.0004)" in build("gspo")[1].formula()
    assert "clip(r, 0, 5)" in build("cispo")[1].formula()
    assert "/ 8" in build("dr_grpo")[1].formula()
    assert "1e-06" in build("verl_grpo")[0].formula() and "0.0001" in build("trl_grpo")[0].formula()
    assert build("tunix_grpo")[1].warnings() and not build("grpo")[1].warnings()


def test_overrides_win():
    assert preset("dapo").policy_loss(epsilon_high=0.4).settings.high == 0.4
    assert preset("grpo").advantage_estimator(advantage_ddof=0).settings.advantage_ddof == 0


def test_presets_cannot_be_changed():
    with pytest.raises(TypeError):
        preset("dapo").loss["epsilon_high"] = 1.0


def test_unknown_name_gives_the_nearest():
    with pytest.raises(ValueError, match="algorithm='dap' is not known: did you mean dapo"):
        preset("dap")
    with pytest.raises(ValueError, match="algorithm='PPO' is not known: did you mean ppo"):
        preset("PPO")


def test_the_documentation_lists_every_preset():
    text = (pathlib.Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    for name in PRESETS:
        assert f"`--config.algorithm={name}`" in text, name


DOCS = (pathlib.Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
PINS = (pathlib.Path(__file__).parents[2] / "docs" / "internals" / "algorithms.md").read_text()
TESTS = pathlib.Path(__file__).parents[1]


def test_the_tests_that_the_documentation_names_exist():
    files = [path for path in TESTS.rglob("*.py") if path.name.startswith("test_")]
    defined = set(re.findall(r"^def (test_\w+)\(", "\n".join(path.read_text() for path in files), re.MULTILINE))
    named = set(re.findall(r"`(test_\w+)`", PINS))
    assert len(named) > 40 and not named - defined
    places = set(re.findall(r"`((?:tests/[\w/]+/)?test_\w+\.py|tests/[\w/]+/)`", PINS))
    assert len(places) > 8
    for place in places:
        assert (TESTS.parent / place).exists() or place in {path.name for path in files}, place


def test_every_row_of_the_tables_names_what_pins_it():
    vectors = json.loads((pathlib.Path(__file__).parent / "core_algos.json").read_text())
    groups = [group for group in vectors.values() if isinstance(group, dict)]
    keys = [*vectors, *(key for group in groups for key in group)]
    known = {word for key in keys for word in re.split("[ ,]+", key)}
    for name in set(re.findall(r"vectors? `([^`]+)`", PINS)):
        assert set(name.split()) <= known, name
    presets = [line for line in DOCS.splitlines() if line.startswith("| `--config.algorithm=")]
    assert len(presets) == len(PRESETS)
    for line in presets:
        config, advantage, loss, aggregation, _, source = (cell.strip() for cell in line.strip("|").split("|"))
        pinned = PINS.partition(f"| {config} | ")[2].partition("\n")[0]
        name = config.strip("`").partition("=")[2]
        found = preset(name)
        assert advantage.split(",")[0].split(" ")[0] == found.advantage_estimator().kind, name
        assert loss.split(",")[0].split(" ")[0] == build(name)[1].settings.kind, name
        assert aggregation.split(",")[0] == build(name)[1].settings.mode, name
        assert source and ("vectors `" in pinned or "`test_" in pinned), name
