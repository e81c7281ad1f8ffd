"""Samples as a teacher reads them: after a prompt with a hint, which moves their tokens to other places."""

import dataclasses

import numpy as np
from jaxtyping import Float, Int

from podrl.data.hint import TEACHER_PROMPT
from podrl.types import Rollouts


@dataclasses.dataclass(frozen=True)
class HintedBatch:
    """A batch with the prompts that its teacher reads; each prompt is followed by the sample's own tokens.

    Attributes:
      rollouts: the samples after the teacher's prompts. Routes of experts are left out: the teacher chooses its own
        experts.
      shift_B: number of tokens by which a sample's prompt became longer, negative if it became shorter.
    """

    rollouts: Rollouts
    shift_B: Int[np.ndarray, " B"]

    @staticmethod
    def of(rollouts: Rollouts) -> "HintedBatch":
        """Replaces the prompts for which the field `teacher_prompt` has token ids; other prompts stay as they are."""
        prompts, group_B = rollouts.prompts, rollouts.group_B
        hints = prompts.fields.get(TEACHER_PROMPT, [None] * len(prompts.length_P))
        own_P = np.asarray(prompts.length_P)
        length_P = np.array([n if hint is None else len(hint) for n, hint in zip(own_P, hints, strict=True)], np.int64)
        shift_B = (length_P - own_P)[group_B]
        width = rollouts.tokens_BT.shape[1] + max(int(shift_B.max(initial=0)), 0)
        place_1T = np.arange(width)[None]
        from_BT = place_1T - shift_B[:, None]  # place of each token in the policy's row
        is_prompt_BT = place_1T < length_P[group_B][:, None]
        inside_BT = (from_BT >= 0) & (from_BT < rollouts.tokens_BT.shape[1])
        source_BT = np.where(inside_BT, from_BT, 0)
        columns = {
            field.name: np.where(inside_BT & ~is_prompt_BT, np.take_along_axis(value, source_BT, axis=1), 0)
            for field in dataclasses.fields(rollouts)
            if field.name.endswith("_BT") and (value := getattr(rollouts, field.name)) is not None
        }
        for b, p in enumerate(group_B):
            hint = hints[p]
            columns["tokens_BT"][b, : length_P[p]] = rollouts.tokens_BT[b, : own_P[p]] if hint is None else hint
        columns = {name: x_BT.astype(getattr(rollouts, name).dtype) for name, x_BT in columns.items()}
        return HintedBatch(
            dataclasses.replace(
                rollouts,
                prompts=dataclasses.replace(prompts, length_P=length_P),
                length_B=rollouts.length_B + shift_B,
                route_BTX=None,
                **columns,
            ),
            shift_B,
        )

    def back(
        self, value_nT: Float[np.ndarray, "n T"], chosen_n: Int[np.ndarray, " n"], rollouts: Rollouts
    ) -> Float[np.ndarray, "n T2"]:
        """Moves per-token values of some samples back to the places of these tokens in `rollouts`; 0 on prompts."""
        width = rollouts.tokens_BT.shape[1]
        begin_n = rollouts.prompts.length_P[rollouts.group_B[chosen_n]]
        from_nT = np.arange(width)[None] + self.shift_B[chosen_n][:, None]
        real_nT = (np.arange(width) >= begin_n[:, None]) & (np.arange(width) < rollouts.length_B[chosen_n][:, None])
        return np.where(real_nT, np.take_along_axis(value_nT, np.where(real_nT, from_nT, 0), axis=1), 0)
