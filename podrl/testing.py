"""Property checks of losses and advantages, for tests of your own functions; podrl's functions pass the same checks.

    from podrl import testing
    from my_loss import centred, tanh_clip

    def test_my_loss():
        testing.check_policy_loss(tanh_clip, scale=0.7)
        testing.check_advantage(centred)

Each check raises an AssertionError that says which property does not hold.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podrl.algorithms.estimator import AdvantageEstimator
from podrl.algorithms.gae import outcome_reward
from podrl.algorithms.policy_loss import PolicyLoss, with_old
from podrl.algorithms.policy_rows import PolicyRows, ReferencedRows
from podrl.groups import complete
from podrl.learner.settings import GRPOConfig
from podrl.types import Layout, Ratio

# Four sequences as (prompt tokens, tokens after the prompt). The second sequence has a tool token, which is masked,
# among its sampled tokens; the last sequence is a prompt alone.
SEQUENCES = ((2, 4), (1, 3), (1, 2), (3, 0))
ROWS, WIDTH = 4, 12
# Names of the per-token inputs that every policy loss reads besides mask and lengths: fields that have no default None.
NAMES = [
    field.name.removesuffix("_BT")
    for field in dataclasses.fields(ReferencedRows)
    if field.name.endswith("_BT") and field.name not in ("mask_BT", "length_BT") and field.default is not None
]
Loss = Callable[..., tuple[Ratio, dict[str, Ratio]]]


def check_policy_loss(function: str | Callable[..., Any], **numbers: float) -> None:
    """Checks every property of a policy loss that training relies on.

    The values at masked tokens, the packing of sequences and the split of a batch change neither loss nor gradient; the
    split is not checked for a loss that ranks all tokens of a call. Advantages of 0 give no gradient. Loss and gradient
    stay finite at extreme ratios. On-policy, the loss raises the likelihood of tokens of positive advantage and lowers
    the likelihood of tokens of negative advantage.

    Args:
      function: policy loss, as grpo.policy_loss_fn takes it: a function of your own, 'file.py:function', or the name
        of a built-in loss.
      numbers: values of the function's own keywords.

    Raises:
      AssertionError: a property does not hold; the message says which one.
    """
    key = "policy_loss_args" if callable(function) or ":" in function else None
    more: dict[str, Any] = {key: numbers} if key else dict(numbers)
    loss = GRPOConfig(policy_loss_fn=function, beta=0.0, **more).policy_loss(max_tokens=40)
    with jax.enable_x64(True):
        check_packing(loss)
        if not loss.batch_dependent:
            check_micro_batches(loss)
        check_no_advantage(loss)
        check_direction(loss)
        check_extremes(loss)


def check_advantage(function: str | Callable[..., Any], **numbers: float) -> None:
    """Checks every property of an advantage estimator that training relies on.

    A group of equal rewards has advantage 0. The order of samples in a group does not matter. Padding and the values
    at masked tokens do not matter, even if they are NaN.

    Args:
      function: estimator, as grpo.advantage_estimator takes it: a function of your own, 'file.py:function', or the
        name of a built-in estimator.
      numbers: values of the function's own keywords.

    Raises:
      AssertionError: a property does not hold; the message says which one.
    """
    key = "advantage_args" if callable(function) or ":" in function else None
    more: dict[str, Any] = {key: numbers} if key else dict(numbers)
    estimate = GRPOConfig(advantage_estimator=function, num_generations=4, **more).estimator()
    check_equal_rewards(estimate)
    check_order(estimate)
    check_padding(estimate)


# Properties of a policy loss.


def check_packing(loss: Loss) -> None:
    """Checks that loss, metrics and gradient depend neither on packing nor on the values at masked tokens."""
    tokens = sequences(constant_advantage=False)
    results = []
    for layout in (padded_layout(tokens["owner"]), packed_layout(tokens["owner"])):
        for junk in (0.0, np.nan, np.inf):
            found, metrics, grad_BT = run(loss, lay_out(tokens, layout, junk))
            results.append((numbers_of(found, metrics), grad_BT[layout.row, layout.column]))
            outside = np.count_nonzero(grad_BT) - np.count_nonzero(results[-1][1])
            assert not outside, f"{outside} tokens of padding have a gradient"
    for numbers, grad in results:
        assert_same(numbers, results[0][0], "by how sequences are packed, or what masked tokens hold")
        _close(grad, results[0][1], "the gradient differs by how sequences are packed, or what masked tokens hold")
    assert np.all(results[0][1][tokens["mask"] == 0] == 0), "a masked token has a gradient"
    assert np.any(results[0][1] != 0), "no token has a gradient"


def check_micro_batches(loss: Loss) -> None:
    """Checks that loss, metrics and gradient, summed over parts of a batch, equal the values of the whole batch."""
    tokens = sequences(constant_advantage=False)
    arguments = lay_out(tokens, padded_layout(tokens["owner"]))
    *policy, rows = arguments
    whole, whole_metrics, whole_grad_BT = run(loss, arguments)
    for parts in ([[0], [1], [2], [3]], [[0, 3], [1, 2]], [[2], [0, 1, 3]]):
        total, grad_BT, metrics = Ratio(jnp.zeros(()), jnp.zeros(())), jnp.zeros_like(whole_grad_BT), None
        for part in parts:
            keep_B1 = jnp.isin(jnp.arange(ROWS), jnp.array(part))[:, None]
            some = dataclasses.replace(rows, mask_BT=rows.mask_BT * keep_B1)
            found, of_part, of_part_grad_BT = run(loss, (*policy, some))
            total, grad_BT = total + found, grad_BT + of_part_grad_BT
            metrics = {name: of_part[name] + metrics[name] for name in metrics} if metrics else of_part
        assert metrics is not None
        assert_same(numbers_of(total, metrics), numbers_of(whole, whole_metrics), "by how the batch is split")
        _close(grad_BT, whole_grad_BT, "the gradient differs by how the batch is split into micro-batches")


def check_no_advantage(loss: Loss, *, but: int = 0) -> None:
    """Checks that advantages of 0 give no gradient, except on at most `but` tokens."""
    tokens = sequences() | {"advantage": np.zeros(len(sequences()["mask"]))}
    _, _, grad_BT = run(loss, lay_out(tokens, packed_layout(tokens["owner"])))
    count = np.count_nonzero(grad_BT)
    assert count <= but, f"{count} tokens have a gradient though all advantages are 0"


def check_direction(loss: PolicyLoss) -> None:
    """Checks that an on-policy step changes likelihoods, and changes none against the sign of its token's advantage."""
    tokens = sequences()
    layout = packed_layout(tokens["owner"])
    _, _, grad_BT = run(with_old(loss, "current"), lay_out(tokens, layout))
    push = -grad_BT[layout.row, layout.column] * np.sign(tokens["advantage"])
    assert push.min() >= 0, f"on-policy, a step moves {np.count_nonzero(push < 0)} tokens against their advantage"
    assert push.max() > 0, "on-policy, no token has a gradient"


def check_extremes(loss: Loss) -> None:
    """Checks that loss and gradient are finite in float32 if the policies differ by 60 and by 10,000 nats."""
    tokens = sequences()
    layout = padded_layout(tokens["owner"])
    every = np.arange(tokens["mask"].size)
    for offset in (60.0, 1e4):
        # `current` marks the tokens that the current policy finds unlikely; the other policies find the rest unlikely.
        for current in (every % 2 == 0, every >= 0, every < 0):
            moved = tokens | {"logprob": tokens["logprob"] - offset * current}
            for name in ("old_logprob", "sampler_logprob", "ref_logprob"):
                moved[name] = tokens[name] - offset * ~current
            with jax.enable_x64(False):
                found, metrics, grad_BT = run(loss, lay_out(moved, layout))
            assert found.total.dtype == jnp.float32, f"the loss of float32 arrays is {found.total.dtype}"
            values = [*numbers_of(found, metrics).values()]
            good = np.isfinite(values).all() and np.isfinite(grad_BT).all()
            assert good, f"not finite where policies differ by {offset:g} nats: bound the logarithm of the ratio"


# Properties of an advantage.

_REWARD_B: Any = np.array([1.0, 0.0, 0.5, 0.5, 3.0, 1.0, 1.0, 1.0])  # two prompts, four samples each
_GROUP_B = complete(2, 4)
_MASK_BT: Any = np.tril(np.ones((8, 8)))  # in row b, the first b + 1 tokens are sampled


def check_equal_rewards(estimate: AdvantageEstimator) -> None:
    """Checks that every sample of a group of equal rewards has advantage 0."""
    # The float32 mean of several 0.1s need not be exactly 0.1. An estimator that divides the difference by a standard
    # deviation of about eps makes a large advantage of this rounding error.
    advantage_BT = _advantages(estimate, np.full(8, 0.1, np.float32), _MASK_BT.astype(np.float32))
    assert np.all(advantage_BT == 0.0), f"equal rewards have advantages up to {np.abs(advantage_BT).max():g}, not 0"


def check_order(estimate: AdvantageEstimator) -> None:
    """Checks that permuting the samples of a group permutes their advantages."""
    order = np.array([2, 0, 3, 1, 7, 5, 4, 6])
    permuted_BT = _advantages(estimate, _REWARD_B[order], _MASK_BT[order])
    straight_BT = _advantages(estimate, _REWARD_B, _MASK_BT)
    assert np.any(straight_BT != 0), "no sample has an advantage"
    np.testing.assert_allclose(permuted_BT, straight_BT[order], atol=1e-12, err_msg="the order of samples matters")


def check_padding(estimate: AdvantageEstimator) -> None:
    """Checks that padding and the values at masked tokens change no advantage, and that padding has advantage 0."""
    reward_BT: Any = outcome_reward(_REWARD_B, _MASK_BT)
    plain_BT = _advantages(estimate, _REWARD_B, _MASK_BT)
    wide_BT: Any = np.pad(np.where(_MASK_BT > 0, reward_BT, np.nan), ((0, 0), (2, 3)), constant_values=np.nan)
    wide_mask_BT: Any = np.pad(_MASK_BT, ((0, 0), (2, 3)))
    padded_BT = estimate(wide_BT, _REWARD_B * 0, wide_mask_BT, group_B=_GROUP_B)
    np.testing.assert_allclose(padded_BT[:, 2:-3], plain_BT, atol=1e-12, err_msg="padding matters")
    assert np.all(padded_BT[:, :2] == 0) and np.all(padded_BT[:, -3:] == 0), "padding has an advantage"


def _advantages(estimate: AdvantageEstimator, reward_B: Any, mask_BT: Any) -> np.ndarray:
    baseline_B: Any = np.zeros_like(reward_B)
    advantage_BT = np.asarray(estimate(outcome_reward(reward_B, mask_BT), baseline_B, mask_BT, group_B=_GROUP_B))
    # The checks compare advantages by numpy.testing, which takes NaN for equal to NaN, so NaN is refused here.
    assert np.all(np.isfinite(advantage_BT)), "an advantage is NaN or infinite"
    return advantage_BT


# A small batch of sequences in two layouts.


def policy_rows(segment_BT: Any, mask_BT: Any, length_BT: Any, *, kl_scale: Any = 1.0, **given_BT: Any) -> PolicyRows:
    """Builds the rows of a policy loss: inputs that are not passed are zeros, and so are token ids and positions."""
    blank_BT = jnp.zeros(segment_BT.shape, int)
    inputs = {f"{name}_BT": given_BT.get(name, jnp.zeros_like(mask_BT)) for name in NAMES}
    layout = Layout(blank_BT, segment_BT, blank_BT)
    return ReferencedRows(layout=layout, mask_BT=mask_BT, length_BT=length_BT, kl_scale=kl_scale, **inputs)


@dataclasses.dataclass(frozen=True)
class Places:
    """The place of each token of the batch: row, column and segment id."""

    row: np.ndarray
    column: np.ndarray
    segment: np.ndarray


def sequences(seed: int = 0, *, constant_advantage: bool = True) -> dict[str, np.ndarray]:
    """Draws the per-token arrays of a batch, by name; each holds the tokens of all sequences, one after the other."""
    rng = np.random.default_rng(seed)
    mask, length, owner = [], [], []
    for index, (prompt, loss) in enumerate(SEQUENCES):
        flags = [0] * prompt + [1] * loss
        if index == 1:
            flags[2] = 0  # tool output between sampled tokens
        mask += flags
        length += [max(sum(flags), 1)] * len(flags)
        owner += [index] * len(flags)
    tokens = len(mask)
    logprob = -rng.uniform(0.2, 3.0, tokens)
    per_sequence = np.array([1.3, -0.7, 0.4, 2.0])
    advantage = per_sequence[owner] if constant_advantage else rng.normal(size=tokens)
    return {
        "logprob": logprob,
        "old_logprob": logprob + rng.normal(scale=0.3, size=tokens),
        "ref_logprob": logprob + rng.normal(scale=0.5, size=tokens),
        "sampler_logprob": logprob + rng.normal(scale=0.3, size=tokens),
        "advantage": advantage,
        "entropy": rng.uniform(0.1, 2.0, tokens),
        "mask": np.array(mask, float),
        "length": np.array(length, float),
        "owner": np.array(owner),
    }


def padded_layout(owner: np.ndarray) -> Places:
    """Lays out one sequence per row."""
    column = np.concatenate([np.arange((owner == index).sum()) for index in range(len(SEQUENCES))])
    return Places(owner, column, np.ones_like(owner))


def packed_layout(owner: np.ndarray) -> Places:
    """Lays out sequences 2 and 0 in the last row, and sequences 3 and 1 in the second row; all other rows are empty."""
    placement = {2: (3, 1), 0: (3, 2), 3: (1, 1), 1: (1, 2)}
    row, column, segment = (np.zeros_like(owner) for _ in range(3))
    used = np.zeros(ROWS, int)
    for index, (to_row, number) in placement.items():
        here = owner == index
        row[here], segment[here] = to_row, number
        column[here] = used[to_row] + np.arange(here.sum())
        used[to_row] += here.sum()
    return Places(row, column, segment)


def lay_out(tokens: dict[str, np.ndarray], layout: Places, junk: float = 0.0) -> tuple[Any, Any, PolicyRows]:
    """Builds the arguments of a PolicyLoss in a layout; `junk` fills every entry that must not change the result."""
    keep = tokens["mask"] > 0

    def rows(name: str, fill: float) -> np.ndarray:
        x_BT = np.full((ROWS, WIDTH), fill)
        x_BT[layout.row, layout.column] = tokens[name]
        return x_BT

    inputs = {"mask": jnp.asarray(rows("mask", 0.0)), "length": jnp.asarray(rows("length", 1.0))}
    for name in ("logprob", "entropy", *(name for name in NAMES if name in tokens)):
        x_BT = rows(name, junk)
        x_BT[layout.row[~keep], layout.column[~keep]] = junk
        inputs[name] = jnp.asarray(x_BT)
    segment_BT = np.zeros((ROWS, WIDTH), np.int32)
    segment_BT[layout.row, layout.column] = layout.segment
    logprob_BT, entropy_BT, mask_BT, length_BT = (inputs.pop(name) for name in ("logprob", "entropy", "mask", "length"))
    return logprob_BT, entropy_BT, policy_rows(jnp.asarray(segment_BT), mask_BT, length_BT, **inputs)


@functools.lru_cache(maxsize=32)
def compiled(loss: Loss) -> Callable[..., Any]:
    """Compiles a loss once for all calls; the program returns loss, metrics and gradient of the loss's numerator."""

    def total(logprob_BT: Any, *rest: Any) -> Any:
        found, metrics = loss(logprob_BT, *rest)
        return found.total, (found, metrics)

    return jax.jit(jax.value_and_grad(total, has_aux=True))


def run(loss: Loss, arguments: Sequence[Any]) -> tuple[Ratio, dict[str, Ratio], np.ndarray]:
    """Computes (loss, metrics, gradient of the loss's numerator) of the arguments that `lay_out` built."""
    (_, (found, metrics)), grad_BT = compiled(loss)(*arguments)
    return found, metrics, np.asarray(grad_BT)


def numbers_of(loss: Ratio, metrics: dict[str, Ratio]) -> dict[str, tuple[float, float]]:
    """Reads the numerators and denominators of a loss and its metrics."""
    return {name: (float(ratio.total), float(ratio.count)) for name, ratio in ({"loss": loss} | metrics).items()}


def assert_same(a: dict[str, Any], b: dict[str, Any], why: str) -> None:
    """Asserts that two results of `numbers_of` agree to 1e-12; `why` completes 'loss differs ...'."""
    assert a.keys() == b.keys()
    for name in a:
        _close(a[name], b[name], f"{name} differs {why}")


def _close(a: Any, b: Any, message: str) -> None:
    np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12, equal_nan=False, err_msg=message)
