"""The protocol of environments: a coroutine plays one sample, appending observations and getting the model's turns."""

import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar

from podrl.mappings import ChatMessage, TaskFields, ToolSchema

T = TypeVar("T")
Role = Literal["raw", "user", "tool"]
FULL = "full"  # value of Turn.stop if the sample has no room for the observation: `say` raises Ended
REFUSED = "refused"  # value of Turn.stop if a request was refused; Turn.text has the fields of the RefusedRequest


class Ended(Exception):  # noqa: N818 - not an error, like StopIteration
    """The sample has no room or no turns left; it ends without a Result. `run` should not catch this exception."""


class OutsideError(Exception):
    """An outside call failed: `make` raised an error, in this run or in the run that recorded the call.

    The text of this error is the class and the text of the original error: 'ValueError: ...'.
    """


@dataclasses.dataclass(frozen=True)
class Task:
    """One sample of one prompt.

    Attributes:
      prompt: the prompt's text, as the model sees it.
      fields: fields of the data's record besides the prompt, JSON values.
      seed: seed derived from the sample's random key, so that a resumed run uses the same seed; 0 to 2^32 - 1.
      index: position of the prompt in the data stream since step 0.
      sample: index of the sample among the samples of its prompt, from 0; -1 for a greedy sample.
      step: number of training steps before the step of this sample.
      mode: 'train' or 'eval'.
    """

    prompt: str
    fields: TaskFields = dataclasses.field(default_factory=dict)
    seed: int = 0
    index: int = 0
    sample: int = 0
    step: int = 0
    mode: Literal["train", "eval"] = "train"


@dataclasses.dataclass(frozen=True)
class Turn:
    """The text that the model samples between two observations.

    Attributes:
      text: the sampled text, including the stop string.
      stop: reason why the turn ended: the stop string that was met, 'eos' for the end of the model's turn, or 'length'
        for a limit of tokens.
      tokens: the sampled token ids.
      calls: tool calls that `say` ran or refused before it returned this turn; empty without a ToolEnvironment.
      prompt: token ids of the conversation that this turn answers; empty for `say`.
      logprobs: log-probability of each token, in nats; empty unless an agent program requests log-probabilities.
      pieces: text of each token; empty unless an agent program requests the texts of tokens.
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
      reward: the environment's last reward, assigned to the last sampled token. It is multiplied by env.reward_weight
        and added to the rewards of the reward functions. None adds no reward.
      metrics: numbers by name, logged as env/NAME.
      text: the completion that reward functions read; None lets them read the text that the model wrote.
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
        """Appends an observation, which is not trained on, and samples the model's next turn.

        Args:
          observation: text to append; '' continues the sample without new text.
          role: 'raw' inserts the text unchanged into the model's own turn. 'user' and 'tool' format the text as a turn
            of the chat template, after which a new turn of the model begins.
          stop: strings that end the turn, besides the end of the model's turn.
          max_new: largest number of sampled tokens; None samples as many as there is room for.
          reward: reward of the previous turn, assigned to that turn's last sampled token.

        Raises:
          Ended: the sample has no room or no turns left; let it propagate.
        """
        ...

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[ToolSchema] = (),
        stop: Sequence[str] = (),
        max_tokens: int | None = None,
        aside: bool = False,
    ) -> dict[str, Any]:
        """Answers a conversation, as /v1/chat/completions does; an episode uses either `chat` or `say`.

        A conversation that repeats an earlier conversation and its answer, and then adds messages, continues the tokens
        of that answer. Any other conversation opens a piece of the sample with a context of its own. All pieces are
        trained with the sample's advantage, except for answers with `aside`.

        Args:
          messages: conversation, in OpenAI's form.
          tools: functions that the model may call, in OpenAI's form.
          stop: strings that end the answer; the string that was met is cut off the answer's text.
          max_tokens: largest number of sampled tokens; None samples as many as there is room for.
          aside: True if the answer is left out of training, as for judges, titles and simulated users.

        Returns:
          The assistant's message, with `tool_calls` if the model called tools.

        Raises:
          Ended: the sample has no room or no turns left; let it propagate.
        """
        ...

    async def outside(self, what: str, make: Callable[[], Awaitable[T]]) -> T:
        """Gets an answer from outside the environment's own code, such as a service, a clock or a random number.

        The answer is recorded before it is used. A replay reads the record instead of calling `make` again.

        Args:
          what: description of the request. A replay uses the record only if its description is the same.
          make: function that gets the answer, a JSON value.

        Raises:
          OutsideError: `make` raised an error, now or when the record was made.
        """
        ...


class Environment(Protocol):
    """An environment of samples.

    All actions of `run` must depend only on the task, the model's turns and the answers of `Model.outside`. After the
    death of a worker process, a replay calls `run` again and must get the same observations.

    An environment may have the attribute `observes_first = True`: the observation of its first `say` is then a part of
    the prompt. It follows the data's question after an empty line, in the same turn of the user, whatever its role.
    """

    async def run(self, task: Task, model: Model) -> Result | None:
        """Plays one episode. None as the result means `Result()`. An error other than `Ended` ends the job."""
        ...
