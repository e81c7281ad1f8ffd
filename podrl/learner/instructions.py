"""Chooses the instructions before a question: SYSTEM_PROMPT if a built-in reward function reads its tags, else none."""

from collections.abc import Iterable

from podrl.data.template import SYSTEM_PROMPT
from podrl.rewards import reasoning
from podrl.rewards.reference import BUILT_IN


def instructions_for(fns: Iterable[object]) -> str:
    """Returns SYSTEM_PROMPT if `fns` has a built-in function that reads the tags which SYSTEM_PROMPT names, else ''.

    Args:
      fns: reward functions as in RewardConfig.fns; a name may end in '@' and the name of a data set.
    """
    named = {fn.partition("@")[0] for fn in fns if isinstance(fn, str)}
    return SYSTEM_PROMPT if named & {*BUILT_IN, reasoning.NAME} else ""
