"""The command that serves a model to agent programs, over an endpoint like OpenAI's.

    python -m podrl.serve --model=DIR|RUN|tiny|tiny_tools [--port=8100 --context=8192 --parser=hermes ...]

It prints the address and the key, and answers /v1/chat/completions, /v1/completions, /inference/v1/generate and
/v1/models until Ctrl-C or SIGTERM, when requests that are open may finish for 10 seconds. The model's name is 'policy'.
Requests are sampled together in one running batch; each gets the tokens that it would get alone. docs/agents.md says
which fields are honoured, and what to set in the SDK of an agent.
"""

import argparse
import asyncio
import importlib.util
import math
import os
import pathlib
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, get_args

from podrl.environments.config import Parser as CallParser
from podrl.environments.front import Front, FrontSettings
from podrl.environments.wire.asks import Answer, Part, Refused, Wanted
from podrl.runtime import environment, hub, signals
from podrl.runtime.arguments import Parser
from podrl.runtime.service import ServiceError
from podrl.runtime.storage import StorageError, locate
from podrl.runtime.user_code import Limits
from podrl.runtime.workers import reap

DTYPES = ("float32", "bfloat16", "float16")
_EPISODE = "serve"
_IDLE_S = 1.0  # between looks while nobody asks
_FINISH_S = 10.0  # in which open requests may finish once the command is to end
_CONTEXT = 8192  # tokens, at most, where --context does not say


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="podrl.serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model",
        required=True,
        help="Hugging Face directory, ORG/NAME of the hub, directory of a run (its newest checkpoint), or tiny or "
        "tiny_tools, which come with podrl",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at; the key is asked for at each")
    parser.add_argument("--port", type=int, default=0, help="0 for any that is free")
    parser.add_argument(
        "--parser", choices=get_args(CallParser), default="hermes", help="how the model writes a tool call (env.parser)"
    )
    parser.add_argument(
        "--context", type=int, default=None, help="most tokens of a prompt and its answer; default: the model's, "
        f"{_CONTEXT} at most"
    )  # fmt: skip
    parser.add_argument("--lanes", type=int, default=32, help="answers that are sampled at once; further ones wait")
    parser.add_argument("--max_requests", type=int, default=256, help="requests that are open at once; others wait")
    parser.add_argument("--temperature", type=float, default=1.0, help="of requests that name none; likewise:")
    parser.add_argument("--top_p", type=float, default=1.0)
    parser.add_argument("--top_k", type=int, default=0)
    parser.add_argument("--min_p", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0, help="of requests that name none")
    parser.add_argument(
        "--dtype", default=None, choices=DTYPES, help="of weights and cache; bfloat16 where there is an accelerator"
    )
    parser.add_argument("--mesh", default="auto", help="for example data=2,tensor=4; auto: data over all devices")
    parser.add_argument("--devices", type=int, default=1, help="faked CPU devices where there is no accelerator")
    return parser


def main(argv: Sequence[str]) -> int:
    """Serves until a signal ends it; returns the exit status."""
    args = _parser().parse_args(argv)
    environment.prepare(os.environ, fake_devices=args.devices)
    environment.keep_compiled(os.environ, "auto")
    try:
        return _serve(args)
    except (ValueError, OSError, ImportError, StorageError, ServiceError) as error:
        _say(f"podrl.serve: error: {error}")
        return 1


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")


def _serve(args: argparse.Namespace) -> int:
    _check(args)
    serving, context = _loaded(args)
    settings = FrontSettings(
        host=args.host,
        port=args.port,
        parser=args.parser,
        context_tokens=context,
        max_requests=args.max_requests,
    )
    with Desk(settings, Limits()) as desk:
        ended = threading.Event()
        for number in signals.NUMBERS:
            signal.signal(number, lambda *_: ended.set() or desk.wake())
        where = f"base_url={desk.address} api_key={desk.key}"
        sys.stdout.write(f"{args.model} is served as model {settings.models[0]!r}: {where}  (Ctrl-C ends)\n")
        sys.stdout.flush()
        run(serving, desk, ended.is_set)
    return 0


def run(serving: Any, desk: "Desk", ended: Callable[[], bool]) -> None:
    """Answers the requests of a desk by a podrl.rollout.serving.Serving.

    Once `ended` is true, new requests are refused, and the call returns when the open ones are answered, after 10 s at
    the latest.

    Raises:
      ServiceError: the front's process has died.
    """
    last = math.inf
    try:
        while serving.busy or last == math.inf:
            if ended() and last == math.inf:
                last = time.monotonic() + _FINISH_S
            if time.monotonic() > last:
                return
            for number, wanted in desk.poll(0.0 if serving.busy or last < math.inf else _IDLE_S):
                try:
                    if wanted is None:
                        serving.drop(number)
                    elif last < math.inf:
                        raise Refused(503, "ending", "This server is about to end.")
                    else:
                        serving.ask(number, wanted)
                except Refused as refused:
                    desk.tell(number, refused)
            for number, said in serving.step():
                desk.tell(number, said)
    finally:
        serving.close()


class Desk:
    """A front on an event loop of its own, for one thread that polls it.

    Attributes:
      address, key: what clients are to use.
    """

    def __init__(self, settings: FrontSettings, limits: Limits) -> None:
        """Starts the front.

        Raises:
          ValueError, ServiceError: as of Front.start.
        """
        self._events: queue.SimpleQueue[tuple[int, Wanted | None] | Exception | None] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="podrl-front", daemon=True)
        self._thread.start()
        self._front = Front(settings, limits, self)
        try:
            self.address, self.key = asyncio.run_coroutine_threadsafe(self._open(), self._loop).result()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Desk":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def _open(self) -> tuple[str, str]:
        address = await self._front.start()
        return address, self._front.open(_EPISODE)

    def poll(self, timeout_s: float) -> list[tuple[int, Wanted | None]]:
        """Requests that have come, and (number, None) for those that were given up; waits for the first.

        Raises:
          ServiceError: the front's process has died.
        """
        found: list[tuple[int, Wanted | None]] = []
        try:
            event = self._events.get(timeout=timeout_s) if timeout_s else self._events.get_nowait()
            while True:
                if isinstance(event, Exception):
                    raise event
                if event is not None:
                    found.append(event)
                event = self._events.get_nowait()
        except queue.Empty:
            return found

    def tell(self, number: int, said: Part | Answer | Refused) -> None:
        """Answers a request, in part or at the end."""
        front = self._front
        tell = {Part: front.part, Answer: front.answer, Refused: front.refuse}[type(said)]
        self._loop.call_soon_threadsafe(tell, number, said)

    def wake(self) -> None:
        """Ends a `poll` that waits."""
        self._events.put(None)

    def end_key(self) -> None:
        """Ends the key: requests are refused from then on."""
        self._loop.call_soon_threadsafe(self._front.close, _EPISODE)

    def close(self) -> None:
        """Ends the front's process."""

        async def leave() -> list[Any]:
            return self._front.leave()

        workers = asyncio.run_coroutine_threadsafe(leave(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        reap(workers)

    # podrl.environments.front.Handler, on the loop's thread.

    def asked(self, number: int, episode: str, wanted: Wanted) -> None:
        """Keeps a request for `poll`."""
        del episode
        self._events.put((number, wanted))

    def dropped(self, number: int) -> None:
        """Keeps for `poll` that a request was given up."""
        self._events.put((number, None))

    def failed(self, error: Exception) -> None:
        """Keeps an error for `poll`, which raises it."""
        self._events.put(error)


def _check(args: argparse.Namespace) -> None:
    """Refuses, before anything is loaded, arguments that cannot be served.

    Raises:
      ValueError: names the argument.
    """
    for name in ("lanes", "devices", "max_requests", "context"):
        if (value := getattr(args, name)) is not None and value < (2 if name == "context" else 1):
            raise ValueError(f"--{name}={value} must be at least {2 if name == 'context' else 1}.")
    if not 0 <= args.port < 65536:
        raise ValueError(f"--port={args.port} must be from 0 to 65535.")
    if importlib.util.find_spec("uvicorn") is None:
        raise ValueError("podrl.serve needs package uvicorn: pip install 'podrl[agents]'.")
    if not 0 <= args.seed < 2**32:
        raise ValueError(f"--seed={args.seed} must be at least 0 and below 2**32.")
    if not (args.temperature >= 0 and math.isfinite(args.temperature)):
        raise ValueError(f"--temperature={args.temperature} must be 0 (greedy) or a positive number.")


def _loaded(args: argparse.Namespace, devices: Sequence[Any] | None = None) -> tuple[Any, int]:
    """Loads and compiles the model; returns what answers requests, and the most tokens of one.

    Args:
      args: the command's arguments.
      devices: where it runs; None for all devices of this process.
    """
    import jax
    import jax.numpy as jnp

    from podrl.data.tokenizer import Tokenizer
    from podrl.mesh.build import check_decodes, make_mesh
    from podrl.models.pretrained import check_positions, check_vocab
    from podrl.rollout.config import RolloutConfig, Sampling
    from podrl.rollout.rollout import RolloutWorker
    from podrl.rollout.serving import Serving
    from podrl.types import Policy

    check_decodes(args.mesh, key="--mesh")
    mesh = make_mesh(args.mesh, devices or jax.local_devices(), key="--mesh", auto="data=-1")
    dtype = jnp.dtype(args.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16"))
    model, params, directory = _model(args.model, mesh, dtype)
    tokenizer = Tokenizer.load(directory)
    check_vocab(model, tokenizer.vocab_size)
    context = min(model.max_length, _CONTEXT) if args.context is None else args.context
    check_positions(model, context - 1, context)
    # Any share of the context may be prompt: the longest prompt leaves one token to sample.
    config = RolloutConfig(
        max_prompt_length=context - 1, max_tokens_to_generate=1, kv_cache_size=context, lanes=args.lanes
    )
    given = {"pad_id": tokenizer.pad_id, "eos_ids": tokenizer.eos_ids, "decode": tokenizer.decode}
    worker = RolloutWorker(model, mesh, config, seed=args.seed, **given)
    worker.warm_up(params, _say)
    names = ("temperature", "top_p", "top_k", "min_p")
    sampling = Sampling(**{name: getattr(args, name) for name in names})
    given = {"sampling": sampling, "parser": args.parser, "seed": args.seed}
    return Serving(worker, Policy(params, 0), tokenizer, **given), context


def _model(name: str, mesh: Any, dtype: Any) -> tuple[Any, Any, Any]:
    """Loads a model: (its configuration, its weights on the mesh, the directory of its tokenizer)."""
    import jax

    from podrl.export import load_run
    from podrl.job.config import EMBEDDED
    from podrl.models import decoder, hf_load, lora

    if (pathlib.Path(name) / "checkpoints").is_dir():
        run, _, params = load_run(locate(name))
        if run.scores:
            raise ValueError(f"--model={name} is the run of a reward model, which generates nothing.")
        config = run.config
        if config.lora.rank:
            config, params = lora.merge(params, config)
        shapes = decoder.abstract_params(config, mesh, dtype)
        return (
            config,
            jax.tree.map(lambda x, to: jax.device_put(x.astype(to.dtype), to.sharding), params, shapes),
            run.tokenizer,
        )
    directory = EMBEDDED.get(name) or locate(hub.local(name))
    if not directory.is_dir():
        raise ValueError(
            f"--model={name} is no directory: give a Hugging Face directory, ORG/NAME of the hub, the directory of a "
            f"run, or {' or '.join(EMBEDDED)}."
        )
    config, params = hf_load.load(directory, mesh, dtype)
    return config, params, directory


if __name__ == "__main__":
    signals.leave_on_signals(unwind=False)
    sys.exit(main(sys.argv[1:]))
