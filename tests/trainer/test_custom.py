"""Users' losses and advantages: found, called with their settings, checked like podrl's own, refused with a reason."""

import importlib
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

import podrl
from podrl import testing
from podrl.algorithms.gae import outcome_reward
from podrl.algorithms.policy_loss import KLLossSettings, PolicyLoss
from podrl.algorithms.surrogates import token_ratio
from podrl.job.config import complete, parse

HERE = __file__
PAIRS = np.array([0, 0, 1, 1])


def my_clip(logprob_BT, old_logprob_BT, advantage_BT, *, reach=0.2):
    ratio_BT = token_ratio(logprob_BT, old_logprob_BT)
    return jnp.maximum(-ratio_BT * advantage_BT, -jnp.clip(ratio_BT, 1 - reach, 1 + reach) * advantage_BT)


def tanh_clip(logprob_BT, old_logprob_BT, advantage_BT, *, scale=0.5):
    return -scale * jnp.tanh((token_ratio(logprob_BT, old_logprob_BT) - 1) / scale) * advantage_BT


def by_sequence(logprob_BT, old_logprob_BT, advantage_BT, *, mask_BT, length_BT):
    return -token_ratio(logprob_BT, old_logprob_BT) * advantage_BT * mask_BT / length_BT


def centred(reward_PG, *, power=1.0):
    gap_PG = reward_PG - reward_PG.mean(axis=1, keepdims=True)
    gap_PG = np.where(np.ptp(reward_PG, axis=1, keepdims=True) > 0, gap_PG, 0.0)
    return np.sign(gap_PG) * np.abs(gap_PG) ** power


def per_token(reward_PG, *, length_PG):
    return centred(reward_PG) / length_PG


def test_a_loss_of_the_user_is_as_good_as_the_same_one_built_in():
    tokens = testing.sequences(constant_advantage=False)
    arguments = testing.lay_out(tokens, testing.packed_layout(tokens["owner"]))
    more = {"sampler_correction": "tis", "entropy_coef": 0.01, "loss_agg_mode": "token-mean"}
    mine = podrl.GRPOConfig(policy_loss_fn=f"{HERE}:my_clip", policy_loss_args={"reach": 0.1}, **more).policy_loss(40)
    ours = PolicyLoss(KLLossSettings(epsilon=0.1, **more))
    found, expected = (testing.run(loss, arguments) for loss in (mine, ours))
    assert testing.numbers_of(found[0], {}) == testing.numbers_of(expected[0], {})
    np.testing.assert_array_equal(found[2], expected[2])
    assert found[1].keys() == expected[1].keys()
    assert "my_clip(reach=0.1), your own" in mine.formula()


def test_an_advantage_of_the_user_is_as_good_as_the_same_one_built_in():
    reward_B, mask_BT = np.array([1.0, 0.0, 3.0, 3.0]), np.tril(np.ones((4, 4)))
    reward_BT = outcome_reward(reward_B, mask_BT)
    more = {"num_generations": 2, "advantage_scale": "none"}
    mine = podrl.GRPOConfig(advantage_estimator=centred, **more).estimator()
    ours = podrl.GRPOConfig(**more).estimator()
    made, expected = (estimate(reward_BT, reward_B, mask_BT, group_B=PAIRS) for estimate in (mine, ours))
    np.testing.assert_array_equal(made, expected)
    squared = podrl.GRPOConfig(advantage_estimator=centred, advantage_args={"power": 2.0}, **more).estimator()
    np.testing.assert_array_equal(squared(reward_BT, reward_B, mask_BT, group_B=PAIRS).sum(axis=1), [0.25, -0.5, 0, 0])


@pytest.mark.parametrize("loss", [my_clip, tanh_clip, by_sequence, f"{HERE}:tanh_clip"])
def test_good_losses_pass(loss):
    testing.check_policy_loss(loss)


@pytest.mark.parametrize("estimator", [centred, per_token, f"{HERE}:centred"])
def test_good_advantages_pass(estimator):
    testing.check_advantage(estimator)


def exponential(logprob_BT, old_logprob_BT, advantage_BT):
    return -jnp.exp(logprob_BT - old_logprob_BT) * advantage_BT


def upside_down(logprob_BT, old_logprob_BT, advantage_BT):
    return token_ratio(logprob_BT, old_logprob_BT) * advantage_BT


def never_praises(logprob_BT, old_logprob_BT, advantage_BT):
    return token_ratio(logprob_BT, old_logprob_BT) * abs(advantage_BT)


def whatever_happens(logprob_BT, old_logprob_BT, advantage_BT):
    return -logprob_BT * (1 + advantage_BT)


def by_the_batch(logprob_BT, old_logprob_BT, advantage_BT):
    return -token_ratio(logprob_BT, old_logprob_BT) * (advantage_BT - advantage_BT.mean())


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (exponential, "not finite where policies differ by"),
        (never_praises, "against their advantage"),
        (whatever_happens, "have a gradient though all advantages are 0"),
        (by_the_batch, "differs by how the batch is split"),
    ],
)
def test_bad_losses_are_told_what_does_not_hold(loss, said):
    with pytest.raises(AssertionError, match=said):
        testing.check_policy_loss(loss)


@pytest.mark.parametrize(
    ("estimator", "said"),
    [
        (lambda reward_PG: reward_PG, "equal rewards have advantages"),
        (lambda reward_PG: centred(reward_PG) * np.arange(reward_PG.shape[1]), "the order of samples matters"),
        (lambda reward_PG: np.zeros_like(reward_PG), "no sample has an advantage"),
    ],
)
def test_bad_advantages_are_told_what_does_not_hold(estimator, said):
    with pytest.raises(AssertionError, match=said):
        testing.check_advantage(estimator)


@pytest.mark.parametrize("check", [testing.check_order, testing.check_padding])
def test_an_advantage_that_is_not_a_number_is_told(check):
    """The checks compare advantages, and must not take NaN for equal to NaN."""
    with pytest.raises(AssertionError, match="an advantage is NaN or infinite"):
        check(lambda reward_BT, baseline_B, mask_BT, **_: np.where(mask_BT > 0, np.nan, 0.0))


def no_default(logprob_BT, old_logprob_BT, advantage_BT, *, scale):
    return logprob_BT


def one_number(logprob_BT, old_logprob_BT, advantage_BT):
    return logprob_BT.mean()


def fails(logprob_BT, old_logprob_BT, advantage_BT):
    return logprob_BT + unknown_name  # noqa: F821  # pyright: ignore[reportUndefinedVariable]


def by_bare_branch(logprob_BT, old_logprob_BT, advantage_BT):
    return -logprob_BT * advantage_BT if advantage_BT > 0 else logprob_BT


def by_branch(logprob_BT, old_logprob_BT, advantage_BT):
    return -logprob_BT * advantage_BT if (advantage_BT > 0).all() else logprob_BT


def of_numpy(logprob_BT, old_logprob_BT, advantage_BT):
    return -np.exp(logprob_BT) * advantage_BT


def of_the_logarithm(logprob_BT, old_logprob_BT, advantage_BT):
    return -jnp.log(advantage_BT) * logprob_BT


def of_the_root(logprob_BT, old_logprob_BT, advantage_BT):
    return advantage_BT * jnp.sqrt(jnp.square(logprob_BT - old_logprob_BT))


def of_the_old(logprob_BT, old_logprob_BT, advantage_BT):
    return -advantage_BT * jnp.exp(old_logprob_BT)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy_loss_fn": upside_down}, r"upside_down makes every token with a positive .* sign"),
        ({"policy_loss_fn": by_bare_branch}, r"by_bare_branch fails .*: jax compiles the function, .*jnp\.where"),
        ({"advantage_estimator": lambda r: r if r > 0 else -r}, r"no single truth value: use np\.where instead"),
        ({"policy_loss_fn": by_branch}, r"by_branch fails .*: jax compiles the .* jnp\.where instead of .*line \d+"),
        ({"policy_loss_fn": of_numpy}, r"of_numpy fails .*: jax compiles the .* jax\.numpy instead of numpy"),
        ({"policy_loss_fn": of_the_logarithm}, r"the loss of of_the_logarithm is nan .* and advantage=-1: it must be"),
        ({"policy_loss_fn": of_the_root}, r"the gradient of of_the_root is nan where logprob=-0\.5, old_logprob=-0\.5"),
        ({"policy_loss_fn": of_the_old}, r"gradient of of_the_old .* is 0 at all 12 tokens .* no update would change"),
        ({"policy_loss_fn": f"{HERE}:tanh_klip"}, r"GRPOConfig\.policy_loss_fn=.*has no function or class 'tanh_klip'"),
        ({"policy_loss_fn": "gone.py:f"}, r"gone\.py does not exist"),
        ({"policy_loss_fn": no_default}, r"keyword 'scale' of no_default must have a number as default, or be one of"),
        ({"policy_loss_fn": one_number}, r"one_number returns .* it must return the loss of every token"),
        ({"policy_loss_fn": fails}, r"fails fails on arrays .*NameError: name 'unknown_name'.*line \d+"),
        ({"policy_loss_fn": tanh_clip, "policy_loss_args": {"skale": 1}}, r"args has no key 'skale'.*'scale'"),
        ({"policy_loss_fn": tanh_clip, "policy_loss_args": {"scale": "x"}}, r"args\.scale='x' must be a number"),
        ({"policy_loss_args": {"scale": 1}}, r"policy_loss_args=.* sets numbers for a function of your own"),
        ({"policy_loss_fn": tanh_clip, "epsilon_c": 3.0}, r"epsilon_c=3\.0 works with"),
        ({"policy_loss_fn": tanh_clip, "loss_algo": "gspo-token"}, r"names a loss and so does"),
        ({"advantage_estimator": f"{HERE}:centered"}, r"'centered'; it has .*centred.*\. Did you mean 'centred'"),
        ({"advantage_estimator": lambda r: r.mean()}, r"returns shape \(\) for rewards of shape \(2, 2\)"),
        ({"advantage_estimator": lambda r: r / r.std(axis=1, keepdims=True)}, r"advantages must be finite\. Where"),
        ({"advantage_args": {"power": 2}}, r"advantage_args=.* sets numbers for a function of your own"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_with_the_reason(settings, message):
    with pytest.raises(ValueError, match=message):
        podrl.GRPOConfig(**settings)


def test_an_advantage_that_is_not_finite_ends_the_step():
    inverse = lambda reward_PG: np.where(reward_PG < 0, np.inf, 1.0)  # noqa: E731
    estimate = podrl.GRPOConfig(advantage_estimator=inverse, num_generations=2).estimator()
    mask_BT = np.ones((2, 1))
    with pytest.raises(ValueError, match=r"2 values that are not finite"):
        estimate(-np.ones((2, 1)), np.zeros(2), mask_BT, group_B=PAIRS[:2])


def test_an_advantage_function_that_swaps_prompts_and_samples_ends_the_step():
    estimate = podrl.GRPOConfig(advantage_estimator=lambda reward_PG: reward_PG.T, num_generations=2).estimator()
    with pytest.raises(ValueError, match=r"returned shape \(2, 3\).*for each of 3 prompts x 2 samples"):
        estimate(np.arange(6.0)[:, None], np.zeros(6), np.ones((6, 1)), group_B=np.arange(6) // 2)


def test_the_numbers_of_a_function_are_keys_of_the_configuration():
    given = {"grpo": {"policy_loss_fn": f"{HERE}:tanh_clip", "advantage_estimator": f"{HERE}:centred"}}
    small = {"trainer": {"max_steps": 1, "eval_every_n_steps": 0}, "rollout": {"max_prompt_length": 8}}
    whole = ConfigDict(complete(given | small)).to_dict()
    assert whole["grpo"]["policy_loss_args"] == {"scale": 0.5} and whole["grpo"]["advantage_args"] == {"power": 1.0}
    whole["grpo"]["policy_loss_args"]["scale"] = 0.7
    job = parse(whole)
    assert job.as_mapping()["grpo"]["policy_loss_args"] == {"scale": 0.7}
    block = jnp.zeros((1, 2))
    found = job.algo.policy_loss(8).own(
        block + 1.0, block, block + 1.0, mask_BT=block, length_BT=block, segment_BT=block
    )
    np.testing.assert_allclose(found, -0.7 * np.tanh((np.e - 1) / 0.7), rtol=1e-6)
    assert complete({})["grpo"]["policy_loss_args"] == {}
    assert jax.tree.leaves(complete({"algorithm": "ppo"})["ppo"]["policy_loss_args"]) == []


def test_the_page_s_functions_pass_the_page_s_checks(tmp_path, monkeypatch):
    page = (pathlib.Path(__file__).resolve().parents[2] / "docs" / "algorithms.md").read_text()
    functions, test = re.findall(r"```python\n(.*?)```", page.split("## A loss or an advantage of your own")[1], re.S)[
        :2
    ]
    (tmp_path / "my.py").write_text(functions)
    (tmp_path / "of_mine.py").write_text(test)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("of_mine").test_mine()
