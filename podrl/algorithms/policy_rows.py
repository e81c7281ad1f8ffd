"""Packed rows that the policy loss reads, with reference log-probabilities if the loss needs them.

An update whose loss has further terms wraps these rows (`ExtraTermRows`), once for each further term.
"""

import dataclasses
from typing import Any

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from podrl.algorithms.segments import masked
from podrl.types import Layout, Mask


@flax.struct.dataclass
class PolicyRows:
    """Packed rows that the policy loss reads; log-probabilities in nats.

    Attributes:
      layout: the packed tokens, their segments and positions.
      mask_BT: 1 on tokens that count in the loss.
      length_BT: number of loss tokens in all pieces of this token's sample; 1 on padding and in pieces without a loss
        token. The sequence-mean modes divide by it.
      advantage_BT: advantage of the token.
      old_logprob_BT: log-probability under the policy that the ratio starts from: the trainer's policy before the first
        update on this batch. Until the trainer has computed this number, the sampler's log-probability stands here.
      sampler_logprob_BT: log-probability that the rollout engine reported when it drew the token. If old_logprob_BT
        holds the same numbers, the sampler correction is 1, because the ratio already starts from the sampler.
      kl_scale: factor on the loss's `beta`, for adaptive control. It is an argument of the compiled program, so a new
        value compiles nothing.
      weight_BT: factor on the token's loss; None if all tokens weigh the same.
      loss_BT: number of the token's surrogate: 0 for the loss's own surrogate, n for `PolicyLoss.others[n - 1]`; None
        if the loss has one surrogate.
      age_BT: number of steps between the weights that sampled the token and the weights of the step; None unless
        `PolicyLoss.reads` names `age_BT`.
    """

    layout: Layout
    mask_BT: Mask
    length_BT: Float[Array, "B T"]
    advantage_BT: Float[Array, "B T"]
    old_logprob_BT: Float[Array, "B T"]
    sampler_logprob_BT: Float[Array, "B T"]
    kl_scale: Float[Array, ""] | float
    weight_BT: Float[Array, "B T"] | None = flax.struct.field(default=None, kw_only=True)
    loss_BT: Int[Array, "B T"] | None = flax.struct.field(default=None, kw_only=True)
    age_BT: Float[Array, "B T"] | None = flax.struct.field(default=None, kw_only=True)

    @property
    def alone(self) -> "PolicyRows":
        """The rows of the policy loss: this object itself, which wraps nothing."""
        return self

    def around(self, rows: "PolicyRows") -> Any:
        """Returns `rows`, which replace this object; `ExtraTermRows.around` keeps the wrapping."""
        return rows

    def clean(self) -> "PolicyRows":
        """Sets the values of masked tokens to 0, and their lengths to 1, so that no NaN enters the arithmetic."""
        names = [f.name for f in dataclasses.fields(self) if f.name.endswith("_BT")]
        columns = {name: getattr(self, name) for name in names if name != "mask_BT"}
        values = {name: masked(x_BT, self.mask_BT) for name, x_BT in columns.items() if x_BT is not None}
        values["length_BT"] = jnp.where(self.mask_BT.astype(bool), self.length_BT, jnp.ones((), self.length_BT.dtype))
        return dataclasses.replace(self, **values)

    def with_reference(self, ref_logprob_BT: Float[Array, "B T"]) -> "ReferencedRows":
        """Adds log-probabilities under the reference policy, nats, for a loss with a KL to the reference."""
        return ReferencedRows(**vars(self), ref_logprob_BT=ref_logprob_BT)


@flax.struct.dataclass
class ExtraTermRows:
    """Packed rows of an update whose loss has a further term beside the policy loss.

    Attributes:
      policy: rows of the policy loss, or rows already wrapped for another term.
      weight_BT: weight of the token in the further term, 0 on tokens that do not count in the term.
      scale: divisor of the policy loss, divided by the number of tokens that count in the term. The term's sum times
        `scale` is added to the numerator of the policy loss; the common division then makes it a mean over the term's
        own tokens.
    """

    policy: Any
    weight_BT: Float[Array, "B T"]
    scale: Float[Array, ""] | float

    @property
    def layout(self) -> Layout:
        """The packed tokens, their segments and positions."""
        return self.policy.layout

    @property
    def alone(self) -> PolicyRows:
        """The rows of the policy loss, without any wrapping."""
        return self.policy.alone

    def around(self, rows: PolicyRows) -> Any:
        """Returns a copy of this object in which `rows` replace the rows of the policy loss."""
        return dataclasses.replace(self, policy=self.policy.around(rows))


@flax.struct.dataclass
class ReferencedRows(PolicyRows):
    """PolicyRows for a loss with a KL to the reference, with log-probabilities under the reference in nats."""

    ref_logprob_BT: Float[Array, "B T"]
