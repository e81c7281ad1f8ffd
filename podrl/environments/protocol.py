"""The protocol of environments: a coroutine over one sample gives observations and gets the model's turns."""

import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar

T = TypeVar("T")
Role = Literal["raw", "user", "tool"]
FULL = "full"  # Turn.stop where there was no room for an observation: `say` raises Ended
REFUSED = "refused"  # Turn.stop where a request cannot be honoured; the text is the JSON of a Refused's fields


class Ended(Exception):  # noqa: N818 - no error, as StopIteration
    """The sample has no room or no turns left: `run` lets it pass and the sample ends without a Result."""


class OutsideError(Exception):
    """An outside call failed: `make` raised, now or when the record was made; the text is 'ValueError: its text'."""


@dataclasses.dataclass(frozen=True)
class Task:
    """One sample of one prompt.

    Attributes:
      prompt: the prompt's text, as the model sees it.
      fields: the other fields of the data's record, JSON values.
      seed: made from the key of the sample, so that it is the same in a run that resumes; below 2^32.
      index: number of the prompt in its step; sample: number of the sample of that prompt.
      step: the training step; mode: 'train' or 'eval'.
    """

    prompt: str
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    seed: int = 0
    index: int = 0
    sample: int = 0
    step: int = 0
    mode: Literal["train", "eval"] = "train"


@dataclasses.dataclass(frozen=True)
class Turn:
    """The model's words between two observations.

    Attributes:
      text: the sampled text, the stop string included.
      stop: the stop string that was met, 'eos' for the end of the model's turn, 'length' for a limit of tokens.
      tokens: the sampled token ids.
      calls: the tool calls that the text holds, where the environment names a parser.
      prompt: token ids of the conversation that was answered; empty for `say`.
      logprobs, pieces: log-probability and text of each token; empty unless the request of an agent program wants them.
    """

    text: str
    stop: str = "eos"
    tokens: Sequence[int] = ()
    calls: Sequence[Any] = ()
    prompt: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    pieces: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class Result:
    """The outcome of an episode: its last reward, metrics and text.

    Attributes:
      reward: what the last token is worth beside the reward functions; None for reward functions alone.
      metrics: numbers by name, logged as env/NAME.
      text: what reward functions see as the completion; None for what the model wrote.
    """

    reward: float | None = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    text: str | None = None


class Model(Protocol):
    """The model as an environment sees it."""

    async def say(
        self,
        observation: str = "",
        *,
        role: Role = "raw",
        stop: Sequence[str] = (),
        max_new: int | None = None,
        reward: float = 0.0,
    ) -> Turn:
        """Appends an observation, which is not trained on, and samples on.

        Args:
          observation: text; '' to sample on where the sample stands.
          role: 'raw' puts the text as it is inside the model's own turn; 'user' and 'tool' make a turn of the chat
            template of it, and the model's next turn begins.
          stop: strings at which the turn ends, besides the end of the model's turn.
          max_new: sampled tokens at most; None for what room there is.
          reward: of the turn before; goes to its last sampled token.

        Raises:
          Ended: no room or no turns are left; let it pass.
        """
        ...

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        stop: Sequence[str] = (),
        max_tokens: int | None = None,
        aside: bool = False,
    ) -> dict[str, Any]:
        """Answers a conversation, as /v1/chat/completions does; an episode uses either `chat` or `say`.

        A conversation that repeats an earlier answer and goes on continues that answer's tokens. Any other one opens a
        piece of the sample with a context of its own; all pieces are trained with the sample's advantage.

        Args:
          messages: conversation, in OpenAI's form.
          tools: functions that the model may call, in OpenAI's form.
          stop: strings that end the answer; they are cut off its text.
          max_tokens: sampled tokens at most; None for what room there is.
          aside: the answer is not trained: for judges, titles and simulated users.

        Returns:
          The assistant's message, with `tool_calls` if the model made any.

        Raises:
          Ended: no room or no turns are left; let it pass.
        """
        ...

    async def outside(self, what: str, make: Callable[[], Awaitable[T]]) -> T:
        """An answer of the outside world (a service, a clock, chance): recorded, and taken from the record on a replay.

        Args:
          what: the request in words; on a replay a record of another request is not used.
          make: gets the answer, a JSON value.

        Raises:
          OutsideError: `make` raised; the record says so too.
        """
        ...


class Environment(Protocol):
    """`run` must be a function of the task, the turns and the outside answers: a replay runs it again."""

    async def run(self, task: Task, model: Model) -> Result | None:
        """Plays one episode; None is `Result()`. What it raises ends the job."""
        ...
