"""Games of TextArena and servers of OpenEnv, played as environments where their packages are installed."""

import asyncio
import contextlib
import json
import os
import random
import socket
import threading

import pytest
from test_played_episodes import play

from podrl.environments.config import EnvironmentConfig
from podrl.environments.games import open_env, text_arena
from podrl.environments.protocol import Task, Turn
from podrl.environments.stepped import SteppedEnvironment
from podrl.environments.workers import Episodes
from podrl.workers.user_code import Limits

ADDRESS = "PODRL_TEST_OPENENV"
guess = text_arena("GuessTheNumber-v0", max_number=8)


def first(read):
    """Plays the first cell of the board."""
    assert read
    return "[0]"


noughts = text_arena("TicTacToe-v0", opponent=first)


def walk():
    """Makes a game of gymnasium that reads an action as a text and writes an observation as a text."""
    import gymnasium

    game = gymnasium.make("FrozenLake-v1", is_slippery=False)
    game = gymnasium.wrappers.TransformObservation(game, lambda cell: f"You are at {cell}.", None)
    return gymnasium.wrappers.TransformAction(game, lambda text: int(text), game.action_space)


lake = SteppedEnvironment(walk)
echo = open_env(os.environ.get(ADDRESS, ""), "message", observation="text", level=2)
whole = open_env(os.environ.get(ADDRESS, ""), "message")
wrong = open_env(os.environ.get(ADDRESS, ""), "message", observation="words")


def played(name, said, **settings):
    config = EnvironmentConfig(environment=f"{__file__}:{name}", **settings)
    with Episodes(config, Limits(), journal=None) as episodes:
        return [play(episodes, [Turn(text) for text in said], Task("p", seed=seed)) for seed in (3, 4, 3)]


def test_a_game_for_one_is_a_function_of_its_seed():
    pytest.importorskip("textarena", reason="needs the package textarena")
    before = random.getstate()
    games = played("guess", [f"[{n}]" for n in range(1, 9)])
    assert games[0] == games[2]
    for says, done in games:
        texts = [say.observation for say in says]
        assert "between 1 and 8" in texts[0]
        # An observation has only the new text, without the player's action.
        assert texts[1:] == ["The target number is higher."] * (len(texts) - 1)
        assert done.reward == 1.0 and done.metrics["steps"] == len(says)
    assert random.getstate() == before


def test_a_game_for_two_has_an_opponent():
    pytest.importorskip("textarena", reason="needs the package textarena")
    for says, done in played("noughts", ["[4]", "[4]", "[4]"]):
        assert "Tic Tac Toe" in says[0].observation and "[0]" in says[1].observation
        assert done.reward == -1.0  # the cell is taken; a second invalid move loses the game


def test_a_game_of_gymnasium_is_a_stepped_environment():
    pytest.importorskip("gymnasium", reason="needs the package gymnasium")
    for says, done in played("lake", "112122"):  # down, down, right, down, right, right
        assert [say.observation for say in says] == [f"You are at {cell}." for cell in (0, 4, 8, 9, 13, 14)]
        assert done.reward == 1.0 and done.metrics == {"steps": 6.0, "return": 1.0}
    for says, done in played("lake", "21"):  # right, and down into a hole
        assert len(says) == 2 and done.reward == 0.0


class Server:
    """An OpenEnv server: three messages end an episode, at most `most` sessions are open, and 'leave' hangs up."""

    def __init__(self, most):
        self.most, self.open, self.resets, self.closed = most, 0, [], 0

    async def session(self, socket):
        if self.open == self.most:
            error = {"message": "no session is free", "code": "CAPACITY_REACHED"}
            await socket.send(json.dumps({"type": "error", "data": error}))
            return
        self.open, left = self.open + 1, 3
        async for raw in socket:
            asked = json.loads(raw)
            if asked["type"] == "close":
                self.closed += 1
                break
            if asked["type"] == "reset":
                self.resets.append(asked["data"])
                seen = {"text": f"seed {asked['data']['seed']}", "left": left}
            elif asked["data"]["message"] == "leave":
                break
            elif asked["data"]["message"] == "wait":
                continue
            else:
                left -= 1
                seen = {"text": asked["data"]["message"].upper(), "left": left}
            data = {"observation": seen, "reward": 0.5 if asked["type"] == "step" else None, "done": left == 0}
            await socket.send(json.dumps({"type": "observation", "data": data}))
        self.open -= 1


@contextlib.contextmanager
def serving(monkeypatch, most=8):
    serve = pytest.importorskip("websockets.asyncio.server", reason="needs the extra [openenv]").serve
    server, ready, ended = Server(most), threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def work():
        async with serve(server.session, "127.0.0.1", 0) as listening:
            monkeypatch.setenv(ADDRESS, f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
            ready.set()
            await ended.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(work(),))
    thread.start()
    ready.wait()
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.close()


def test_a_server_of_openenv_is_played_over_its_websocket(monkeypatch):
    with serving(monkeypatch) as server:
        for seed, (says, done) in zip((3, 4, 3), played("echo", ["a", "b", "c"]), strict=True):
            assert [say.observation for say in says] == [f"seed {seed}", "A", "B"]
            assert [say.reward for say in says] == [0.0, 0.5, 0.5]
            assert done.reward == 0.5 and done.metrics == {"steps": 3.0, "return": 1.5}
        assert server.resets == [{"seed": seed, "level": 2} for seed in (3, 4, 3)] and server.closed == 3
        says, _ = played("whole", ["a", "b", "c"])[0]
        assert json.loads(says[1].observation) == {"text": "A", "left": 2}


@pytest.mark.parametrize(
    ("name", "most", "why"),
    [("wrong", 8, "'words' is not a field .* text, left"), ("echo", 0, "larger max_concurrent_envs")],
)
def test_what_a_server_of_openenv_refuses_is_named(monkeypatch, name, most, why):
    with serving(monkeypatch, most), pytest.raises(Exception, match=why):
        played(name, ["a"])


def test_a_server_of_openenv_that_is_lost_is_named(monkeypatch):
    with serving(monkeypatch), pytest.raises(Exception, match=r"at ws://127\.0\.0\.1:\d+/ws gave no answer to step"):
        played("echo", ["a", "leave"])
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # no program listens at this port
        monkeypatch.setenv(ADDRESS, f"http://127.0.0.1:{nobody.getsockname()[1]}")
        with pytest.raises(
            Exception, match=r"at ws://127\.0\.0\.1:\d+/ws gave no answer to connect .* url of open_env"
        ):
            played("echo", ["a"])


def test_a_server_of_openenv_that_never_answers_ends_its_sample_at_the_deadline(monkeypatch):
    with serving(monkeypatch):
        assert [done.reason for _, done in played("echo", ["wait"], deadline_s=0.5)] == ["deadline"] * 3
