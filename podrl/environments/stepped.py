"""SteppedEnvironment makes any object with `reset` and `step` (gymnasium-like, OpenEnv, SkyRL-gym) an environment."""

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from podrl.environments.protocol import Model, Result, Role, Task


class SteppedEnvironment:
    """Plays an object with `reset` and `step`: the model reads the observations, and its turns are the actions.

    `reset(seed=, task=)` returns the first observation, or (observation, info). An argument is left out if `reset` has
    no parameter for it; a `reset` with `**kwargs` gets the seed alone. `step(text)` returns (observation, reward,
    terminated, truncated, info), (observation, reward, done, info), or an object or mapping with `observation`,
    `reward` and `done`. `reset` and `step` may be coroutine functions; plain functions run in a thread. A replay calls
    both again, so their results must depend only on the seed and the actions.

    Attributes:
      observes_first: True if the observation of `reset` is part of the prompt, see
        podrl.environments.protocol.Environment.
    """

    observes_first = True

    def __init__(self, make: Callable[[], object], *, role: Role = "user", opening: bool = True) -> None:
        """Stores the factory; each episode makes its own object.

        Args:
          make: function without arguments, or class, that makes the object.
          role: role of observations in the sample, see podrl.environments.protocol.Model.say.
          opening: True if the observation of `reset` follows the data's question, after an empty line and in the same
            turn of the user; False if the model does not read this observation.
        """
        self._make, self.observes_first = make, opening
        self._role: Role = role

    async def run(self, task: Task, model: Model) -> Result:
        """Plays one episode; the reward of each step is assigned to the turn that was its action.

        Returns:
          The reward of the last step, and the metrics `steps` (number of steps) and `return` (sum of the rewards).
        """
        stepped = await _called(self._make)
        try:
            first = await _called(stepped.reset, **_accepted(stepped.reset, seed=task.seed, task=task))
            text = _text(first[0] if isinstance(first, tuple) else getattr(first, "observation", first))
            steps, total = 0, 0.0
            turn = await model.say(text, role=self._role) if self.observes_first else await model.say()
            while True:
                observation, reward, done = _outcome(await _called(stepped.step, turn.text))
                steps, total = steps + 1, total + reward
                if done:
                    return Result(reward, {"steps": float(steps), "return": total})
                turn = await model.say(_text(observation), role=self._role, reward=reward)
        finally:
            if callable(close := getattr(stepped, "close", None)):
                await _called(close)


async def _called(fn: Callable[..., object], *args: object, **kwargs: object) -> Any:
    if inspect.iscoroutinefunction(fn):
        return await fn(*args, **kwargs)
    value = await asyncio.to_thread(fn, *args, **kwargs)
    return await value if inspect.isawaitable(value) else value


def _accepted(fn: Callable[..., object], **offered: object) -> Mapping[str, object]:
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return {}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return {"seed": offered["seed"]}
    return {parameter.name: offered[parameter.name] for parameter in parameters if parameter.name in offered}


def _outcome(outcome: Any) -> tuple[Any, float, bool]:
    match outcome:
        case (observation, reward, terminated, truncated, _):
            return observation, float(reward or 0.0), bool(terminated or truncated)
        case (observation, reward, done, _):
            return observation, float(reward or 0.0), bool(done)
        case Mapping():
            names = [name for name in ("observation", "observations") if name in outcome]
            return outcome[names[0]] if names else "", float(outcome.get("reward") or 0.0), bool(outcome["done"])
        case _ if hasattr(outcome, "done"):
            observation = getattr(outcome, "observation", "")
            return observation, float(getattr(outcome, "reward", None) or 0.0), bool(outcome.done)
    raise TypeError(
        f"step returned {type(outcome).__name__} {str(outcome)[:200]}: it must be (observation, reward, terminated, "
        "truncated, info), (observation, reward, done, info), or have observation, reward and done"
    )


def _text(observation: object) -> str:
    """Converts an observation to text; a message becomes the text of its content."""
    if isinstance(observation, Mapping) and "content" in observation:
        return str(observation["content"])
    if isinstance(observation, list | tuple):
        return "\n".join(_text(one) for one in observation)
    return str(observation)
