"""Packed rows that the policy loss reads, alone, with a reference, with ages of tokens, or with both.

An update that has other terms beside the policy loss wraps these rows (`Wrapped`), once for each of the terms.
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
      layout: the tokens and where they lie.
      mask_BT: 1 where the token counts in the loss.
      length_BT: number of loss tokens in this token's sequence (1 on padding): weights of the sequence-mean modes.
      advantage_BT: advantage of the token.
      old_logprob_BT: log-probability under the policy that the ratio starts from: that of the trainer's weights before
        the first update on this batch, or, until they are asked, what the sampler reported.
      sampler_logprob_BT: log-probability the rollout engine reported when it drew the token. Where that is the old one
        too (two policies), the correction is 1, because the ratio already starts from the sampler.
      kl_scale: factor on the loss's `beta`, for adaptive control; traced, so changing it compiles nothing.
      weight_BT: factor on the token's loss; None where all tokens weigh the same.
      loss_BT: number of the token's surrogate among those of the loss, see `PolicyLoss.others`; None if there is one.
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

    @property
    def alone(self) -> "PolicyRows":
        """The rows of the policy loss: these."""
        return self

    def around(self, rows: "PolicyRows") -> Any:
        """Puts other rows of the policy loss in the place of these."""
        return rows

    def clean(self) -> "PolicyRows":
        """Replaces masked tokens by harmless values: 0, and 1 for lengths."""
        names = [f.name for f in dataclasses.fields(self) if f.name.endswith("_BT")]
        given = {name: getattr(self, name) for name in names if name != "mask_BT"}
        values = {name: masked(x_BT, self.mask_BT) for name, x_BT in given.items() if x_BT is not None}
        values["length_BT"] = jnp.where(self.mask_BT.astype(bool), self.length_BT, jnp.ones((), self.length_BT.dtype))
        return dataclasses.replace(self, **values)

    def with_reference(self, ref_logprob_BT: Float[Array, "B T"]) -> "ReferencedRows":
        """Adds log-probabilities under the reference policy, for a loss with a KL to it."""
        return ReferencedRows(**vars(self), ref_logprob_BT=ref_logprob_BT)


@flax.struct.dataclass
class Wrapped:
    """Packed rows of an update with a further term beside the policy loss.

    Attributes:
      policy: rows of the policy loss, which may be wrapped for other terms.
      weight_BT: weight of the token in the term, 0 on tokens that are not the term's.
      scale: divisor of the policy loss over the number of the term's own tokens. The term's sum, added to that loss
        before the division, is so divided by its own tokens.
    """

    policy: Any
    weight_BT: Float[Array, "B T"]
    scale: Float[Array, ""] | float

    @property
    def layout(self) -> Layout:
        """The tokens and where they lie."""
        return self.policy.layout

    @property
    def alone(self) -> PolicyRows:
        """The rows of the policy loss, without those around them."""
        return self.policy.alone

    def around(self, rows: PolicyRows) -> Any:
        """Puts other rows of the policy loss in the place of those within."""
        return dataclasses.replace(self, policy=self.policy.around(rows))


@flax.struct.dataclass
class ReferencedRows(PolicyRows):
    """PolicyRows plus `ref_logprob_BT`, log-probabilities under the reference, for a loss with a KL to it."""

    ref_logprob_BT: Float[Array, "B T"]


@flax.struct.dataclass
class AgedRows(PolicyRows):
    """PolicyRows plus `age_BT`, for a loss that tells tokens apart by age.

    That is the number of updates by which the weights of the step are newer than those that drew the token.
    """

    age_BT: Float[Array, "B T"]

    def with_reference(self, ref_logprob_BT: Float[Array, "B T"]) -> ReferencedRows:
        return AgedReferencedRows(**vars(self), ref_logprob_BT=ref_logprob_BT)


@flax.struct.dataclass
class AgedReferencedRows(AgedRows, ReferencedRows):
    """Rows with ages of tokens and log-probabilities under the reference."""
