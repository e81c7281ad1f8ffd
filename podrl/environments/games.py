"""Games of TextArena, and environments that OpenEnv servers run, as podrl environments.

The packages textarena and websockets (extra [openenv]) are imported when an episode first needs them.
"""

import contextlib
import json
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from podrl.config import install
from podrl.environments.stepped import SteppedEnvironment
from podrl.mappings import JsonObject

# A lock around each use of Python's global random generator: TextArena's games draw from this generator, which all
# episodes of a process share.
_DRAWS = threading.Lock()
# A function from the text that the opponent reads to the opponent's action.
Opponent = Callable[[str], str]


def text_arena(game: str, *, opponent: Opponent | None = None, **settings: object) -> SteppedEnvironment:
    """Makes the environment of a game of TextArena, which the model plays as player 0.

    The reward is the reward that the game gives to player 0.

    Args:
      game: id of the game, such as 'GuessTheNumber-v0'.
      opponent: function that plays player 1 of a game for two players; None for a game for one player.
      settings: keyword arguments of textarena.make.
    """
    return SteppedEnvironment(lambda: _TextArena(game, opponent, settings))


def open_env(url: str, action: str, *, observation: str = "", **reset: object) -> SteppedEnvironment:
    """Makes the environment that a server of OpenEnv runs; each episode opens its own session (a websocket).

    Args:
      url: address of the server, such as 'http://127.0.0.1:8000'.
      action: field of the server's action that takes the model's text, such as 'message' or 'code'.
      observation: field of the server's observation that the model reads; '' for the whole observation as JSON.
      reset: further arguments of the server's reset, besides the seed of the sample.
    """
    return SteppedEnvironment(lambda: _OpenEnv(url, action, observation, reset))


class _TextArena:
    def __init__(self, game: str, opponent: Opponent | None, settings: Mapping[str, object]) -> None:
        import textarena

        # '-raw' leaves out TextArena's wrappers: an observation then holds only messages since the player's last turn.
        self._env = textarena.make(f"{game.removesuffix('-raw')}-raw", **settings)
        self._opponent, self._draws = opponent, None

    def reset(self, seed: int) -> str:
        with self._drawing(seed):
            self._env.reset(num_players=1 if self._opponent is None else 2, seed=seed)
            return self._observed() if self._opponents_turns() else ""

    def step(self, text: str) -> tuple[str, float, bool, JsonObject]:
        with self._drawing():
            done, _ = self._env.step(action=text)
            if not done and self._opponents_turns():
                return self._observed(), 0.0, False, {}
            rewards, _ = self._env.close()
        return "", float(rewards[0]), True, {}

    def _opponents_turns(self) -> bool:
        """Plays turns of the opponent until it is the model's turn; returns False if the game has ended."""
        while self._env.state.current_player_id != 0:
            assert self._opponent is not None
            done, _ = self._env.step(action=self._opponent(self._observed()))
            if done:
                return False
        return True

    def _observed(self) -> str:
        """Reads the new messages for the player whose turn it is, without the player's own actions."""
        player, new = self._env.get_observation()
        return "\n".join(message for sender, message, *_ in new if sender != player).strip()

    @contextlib.contextmanager
    def _drawing(self, seed: int | None = None) -> Iterator[None]:
        """Sets Python's random generator to the state of this game, and restores the former state afterwards.

        Draws of other games therefore do not change this game: a game depends only on its seed and its actions.
        """
        with _DRAWS:
            others = random.getstate()
            if seed is not None:
                random.seed(seed)
            elif self._draws is not None:
                random.setstate(self._draws)
            try:
                yield
            finally:
                self._draws = random.getstate()
                random.setstate(others)


class _OpenEnv:
    def __init__(self, url: str, action: str, observation: str, reset: Mapping[str, object]) -> None:
        scheme, _, rest = url.rstrip("/").partition("://")
        self._url = f"{scheme.replace('http', 'ws')}://{rest}/ws"
        self._action, self._observation, self._reset = action, observation, dict(reset)
        self._socket: Any = None

    async def reset(self, seed: int) -> str:
        try:
            from websockets.asyncio.client import connect
        except ImportError as error:
            raise ImportError(f"open_env needs the package websockets: {install('openenv')}.") from error
        with self._named("connect"):
            self._socket = await connect(self._url, max_size=None)
        return self._read(await self._request("reset", {"seed": seed, **self._reset}))

    async def step(self, text: str) -> tuple[str, float, bool, JsonObject]:
        found = await self._request("step", {self._action: text})
        return self._read(found), float(found.get("reward") or 0.0), bool(found.get("done")), {}

    async def close(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(Exception):  # the server may have ended the session already
                await self._socket.send(json.dumps({"type": "close"}))
            await self._socket.close()

    async def _request(self, kind: str, data: JsonObject) -> JsonObject:
        from websockets.exceptions import ConnectionClosed

        # A server without a free session sends an error, which is read below, and closes the socket.
        with contextlib.suppress(ConnectionClosed):
            await self._socket.send(json.dumps({"type": kind, "data": data}))
        with self._named(kind):
            reply = json.loads(await self._socket.recv())  # the wait ends with the episode, after env.deadline_s
        found = reply.get("data") or {}
        if reply.get("type") == "error":
            more = ""
            if found.get("code") == "CAPACITY_REACHED":
                more = " Each open episode has a session: start the server with a larger max_concurrent_envs."
            raise RuntimeError(f"{self._url} refused {kind}: {found.get('message')} ({found.get('code')}).{more}")
        return found

    @contextlib.contextmanager
    def _named(self, kind: str) -> Iterator[None]:
        """Adds the server and the request to the error if the server cannot be reached or does not answer in JSON."""
        from websockets.exceptions import WebSocketException

        try:
            yield
        except (OSError, WebSocketException, json.JSONDecodeError) as error:
            raise ConnectionError(
                f"The OpenEnv server at {self._url} gave no answer to {kind} ({type(error).__name__}: {error}): check "
                "that it runs, and that the url of open_env is its address."
            ) from error

    def _read(self, found: JsonObject) -> str:
        seen = found.get("observation") or {}
        if not self._observation:
            return json.dumps(seen, ensure_ascii=False)
        if self._observation not in seen:
            raise ValueError(
                f"observation={self._observation!r} is not a field of the observation of {self._url}, which has "
                f"{', '.join(seen) or 'none'}."
            )
        return str(seen[self._observation])
