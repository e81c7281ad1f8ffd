"""Scores answers to problems of the package reasoning-gym (extra [reasoning]) with the scorer of their dataset."""

import ast
import functools
import json
import logging
from collections.abc import Sequence
from typing import Any

from podrl.config import install
from podrl.rewards.text import TextConfig

NAME = "reasoning_gym"
_log = logging.getLogger(__name__)


class ReasoningReward:
    """The reward function 'reasoning_gym'.

    Attributes:
      reads: fields that every record must have.
    """

    reads = ("entry",)

    def __init__(self, **settings: Any) -> None:
        """Stores the settings, which are fields of a TextConfig; the field `extract` says where the answer stands."""
        self._config = TextConfig(**settings)
        self._warned: set[str] = set()  # names of the datasets whose scorer's first error was shown

    def __call__(self, prompts: Sequence[str], completions: Sequence[str], **fields: Any) -> list[float]:
        """Scores every completion by its dataset's scorer, from 0 to 1; some datasets give partial scores for almost
        right answers.

        A completion without an answer scores 0. Some scorers raise an error for an answer that they cannot read; this
        answer also scores 0. A warning shows the first such error of each dataset.

        Raises:
          Exception: the scorer raises an error for the right answer as well.
        """
        del prompts
        return [self._score(completion, entry) for completion, entry in zip(completions, fields["entry"], strict=True)]

    def _score(self, completion: str, entry: str) -> float:
        if (answer := self._config.answer_of(completion)) is None:
            return 0.0
        task = ast.literal_eval(entry)
        scorer, problem = _scorer(task["name"], json.dumps(task["arguments"], sort_keys=True)), task["entry"]
        try:
            return float(scorer(answer, problem))
        except Exception as error:  # noqa: BLE001 - if the right answer fails, too, the next line raises
            scorer(problem["answer"], problem)
            if task["name"] not in self._warned:
                self._warned.add(task["name"])
                _log.warning(
                    "The scorer of reasoning_gym:%s raised %s: %s for the answer %.80r, which scores 0, as do all "
                    "answers that it cannot read.",
                    task["name"],
                    type(error).__name__,
                    error,
                    answer,
                )
            return 0.0


@functools.lru_cache(maxsize=64)
def _scorer(name: str, arguments: str) -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise ImportError(f"reward.fns={NAME!r} needs reasoning-gym: {install('reasoning')}.") from error
    return reasoning_gym.create_dataset(name, **{**json.loads(arguments), "seed": 0, "size": 1}).score_answer
