"""Chooses the instructions before a question: the reference text if a reward function reads the text's tags."""

from collections.abc import Iterable

from podrl.data.template import SYSTEM_PROMPT
from podrl.rewards import reasoning
from podrl.rewards.reference import BUILT_IN


def instructions_for(fns: Iterable[object]) -> str:
    """Returns the reference text if a built-in function that reads its tags is among `fns`, else ''.

    Args:
      fns: reward functions as in RewardConfig.fns; a name may end in '@' and the name of a data set.
    """
    named = {fn.partition("@")[0] for fn in fns if isinstance(fn, str)}
    return SYSTEM_PROMPT if named & {*BUILT_IN, reasoning.NAME} else ""
