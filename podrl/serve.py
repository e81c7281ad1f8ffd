"""The command that serves a model to agent programs, over an endpoint like OpenAI's.

    python -m podrl.serve --model=DIR|RUN|tiny_tools [--port=8100 --context=8192 --parser=hermes ...]

The command prints the address and the key, and answers /v1/chat/completions, /v1/responses, /v1/messages,
/v1/completions, /inference/v1/generate and /v1/models under the model name 'policy'. On Ctrl-C or SIGTERM it refuses
new requests and gives the open ones 10 seconds to finish. All requests are sampled in one running batch; each request
gets the tokens that it would get alone. docs/endpoint.md lists the fields that are honoured, docs/agents.md the
settings of an agent's SDK.
"""

import argparse
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

from podrl.environments.config import History
from podrl.environments.config import Parser as CallParser
from podrl.environments.front import Front, FrontSettings, check_packages
from podrl.environments.wire.requests import Answer, AnswerPart, ParsedRequest, RefusedRequest
from podrl.runtime import environment, signals
from podrl.runtime.arguments import (
    Parser,
    add_device_options,
    add_history_option,
    as_sentence,
    check_numbers,
    write_line,
)
from podrl.runtime.service import ServiceError
from podrl.runtime.watchdog import announce_if_long
from podrl.storage import hub
from podrl.storage.storage import StorageError, locate
from podrl.workers.process import Loop, Process
from podrl.workers.user_code import Limits

_EPISODE = "serve"
_IDLE_S = 1.0  # longest wait for a request while none is open
_FINISH_S = 10.0  # time that open requests have to finish after Ctrl-C or SIGTERM
_CONTEXT = 8192  # largest default of --context, tokens


def _parser() -> argparse.ArgumentParser:
    parser = Parser("podrl.serve", __doc__)
    parser.add_argument(
        "--model",
        required=True,
        help="Hugging Face directory, ORG/NAME of the hub, or directory of a run (its newest checkpoint is served); "
        f"{', '.join(hub.EMBEDDED)} come with podrl",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at")
    parser.add_argument("--port", type=int, default=0, help="port to listen at; 0 takes any free port")
    parser.add_argument(
        "--parser",
        choices=get_args(CallParser),
        default="hermes",
        help="format in which the model writes a tool call (env.parser)",
    )
    add_history_option(parser, get_args(History))
    parser.add_argument(
        "--context",
        type=int,
        default=None,
        help=f"most tokens of a prompt and its answer together; default: the model's context, at most {_CONTEXT}",
    )
    parser.add_argument(
        "--lanes", type=int, default=32, help="number of answers that are sampled at once; further answers wait"
    )
    parser.add_argument(
        "--max_requests", type=int, default=256, help="number of requests that are open at once; further requests wait"
    )
    default_of = "of a request that does not set its own"
    parser.add_argument("--temperature", type=float, default=1.0, help=f"temperature {default_of}; 0 is greedy")
    parser.add_argument("--top_p", type=float, default=1.0, help=f"top_p {default_of}; 1 is off")
    parser.add_argument("--top_k", type=int, default=0, help=f"top_k {default_of}; 0 is off")
    parser.add_argument("--min_p", type=float, default=0.0, help=f"min_p {default_of}; 0 is off")
    parser.add_argument("--seed", type=int, default=0, help=f"random seed {default_of}")
    add_device_options(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    """Serves the model until Ctrl-C or SIGTERM; returns the exit status."""
    args = _parser().parse_args(argv)
    environment.prepare(os.environ, fake_devices=args.devices)
    environment.enable_compile_cache(os.environ, "auto")
    try:
        return _serve(args)
    except (ValueError, OSError, ImportError, StorageError, ServiceError) as error:
        write_line(f"podrl.serve: error: {as_sentence(error)}")
        return 1


def _serve(args: argparse.Namespace) -> int:
    _check(args)
    serving, context = _load(args)
    settings = FrontSettings(
        host=args.host,
        port=args.port,
        parser=args.parser,
        context_tokens=context,
        max_requests=args.max_requests,
        page=True,
    )
    with PolledFront(settings, Limits()) as front:
        stopping = threading.Event()
        for number in signals.NUMBERS:
            signal.signal(number, lambda *_: stopping.set() or front.wake())
        connection = f"base_url={front.address} api_key={front.key}"
        sys.stdout.write(f"{args.model} is served as model {settings.models[0]!r}: {connection}  (Ctrl-C ends)\n")
        sys.stdout.write(f"Its requests and answers: {front.address.removesuffix('v1')}?key={front.key}\n")
        sys.stdout.flush()
        run(serving, front, stopping.is_set)
    return 0


def run(serving: Any, front: "PolledFront", is_ending: Callable[[], bool]) -> None:
    """Passes requests from a front to the engine, and their answers back, until the server ends.

    Args:
      serving: a podrl.rollout.serving.Serving; closed when the call returns.
      front: source of the requests.
      is_ending: function that returns True once the server must end. New requests are then refused with 503, and the
        call returns when all open requests are answered, or after 10 s.

    Raises:
      ServiceError: the front's process has died.
    """
    deadline = math.inf  # time at which open requests are cancelled, by time.monotonic(); infinite before the end
    try:
        while serving.busy or deadline == math.inf:
            if is_ending() and deadline == math.inf:
                deadline = time.monotonic() + _FINISH_S
            if time.monotonic() > deadline:
                return
            for number, request in front.poll(0.0 if serving.busy or deadline < math.inf else _IDLE_S):
                try:
                    if request is None:
                        serving.cancel(number)
                    elif deadline < math.inf:
                        raise RefusedRequest(503, "ending", "This server is shutting down and takes no new requests.")
                    else:
                        serving.add(number, request)
                except RefusedRequest as refused:
                    front.reply(number, refused)
            for number, reply in serving.step():
                front.reply(number, reply)
    finally:
        serving.close()


class PolledFront:
    """Runs a front (the process of the HTTP endpoint) on its own event loop. One thread polls for the requests.

    Attributes:
      address: base URL for clients.
      key: API key for clients.
    """

    def __init__(self, settings: FrontSettings, limits: Limits) -> None:
        """Starts the event loop and the front's process, and opens the key.

        Args:
          settings: settings of the front.
          limits: resources that the front's process may take, and environment variables that it may see.

        Raises:
          ValueError: the front cannot listen at its address, or a package of the extra [agents] is missing.
          ServiceError: the front's process did not start.
        """
        self._events: queue.SimpleQueue[tuple[int, ParsedRequest | None] | Exception | None] = queue.SimpleQueue()
        self._front = Front(settings, limits, self)
        self._loop = Loop("podrl-front")
        try:
            self.address, self.key = self._loop.run(self._open())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "PolledFront":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def _open(self) -> tuple[str, str]:
        address = await self._front.start()
        return address, self._front.open(_EPISODE)

    def poll(self, timeout_s: float) -> list[tuple[int, ParsedRequest | None]]:
        """Waits for a request, and returns every request that has arrived.

        Args:
          timeout_s: longest wait in seconds; 0 does not wait.

        Returns:
          (number, request) for a new request, and (number, None) for a request whose client has hung up. The list is
          empty after the timeout, and may be empty after `wake`.

        Raises:
          ServiceError: the front's process has died.
        """
        events: list[tuple[int, ParsedRequest | None]] = []
        try:
            event = self._events.get(timeout=timeout_s) if timeout_s else self._events.get_nowait()
            while True:
                if isinstance(event, Exception):
                    raise event
                if event is not None:
                    events.append(event)
                event = self._events.get_nowait()
        except queue.Empty:
            return events

    def reply(self, number: int, message: AnswerPart | Answer | RefusedRequest) -> None:
        """Sends a client a part of its answer, the whole answer, or a refusal."""
        front = self._front
        send = {AnswerPart: front.send_part, Answer: front.send_answer, RefusedRequest: front.send_refusal}
        self._loop.soon(send[type(message)], number, message)

    def wake(self) -> None:
        """Makes a waiting `poll` return."""
        self._events.put(None)

    def end_key(self) -> None:
        """Closes the key: open requests are refused with 409, later requests with 401."""
        self._loop.soon(self._front.close, _EPISODE)

    def close(self) -> None:
        """Ends the front's process and the event loop."""
        self._loop.end(self._stop)

    async def _stop(self) -> list[Process]:
        return self._front.leave()

    # The methods of podrl.environments.front.Handler; the event loop's thread calls them.

    def on_request(self, number: int, episode: str, request: ParsedRequest) -> None:
        """Queues a request for `poll`."""
        del episode
        self._events.put((number, request))

    def on_disconnect(self, number: int) -> None:
        """Queues (number, None) for `poll`: the client has hung up."""
        self._events.put((number, None))

    def on_delivered(self, number: int) -> None:
        """Does nothing: a server does not track whether answers have arrived."""

    def on_failure(self, error: Exception) -> None:
        """Queues an error, which `poll` raises."""
        self._events.put(error)


def _check(args: argparse.Namespace) -> None:
    """Checks the arguments before the model is loaded.

    Raises:
      ValueError: an argument is out of its range, or a package of the extra [agents] is missing.
    """
    check_numbers(args, "lanes", "devices", "max_requests")
    if args.context is not None and args.context < 2:
        raise ValueError(f"--context={args.context} must be at least 2: one token of prompt and one of answer.")
    if not 0 <= args.port < 65536:
        raise ValueError(f"--port={args.port} must be from 0 to 65535.")
    check_packages()
    _sampling(args)


def _sampling(args: argparse.Namespace) -> Any:
    """Builds the default sampling settings of requests.

    Raises:
      ValueError: a setting is out of its range.
    """
    from podrl.engine.config import Sampling

    names = ("temperature", "top_p", "top_k", "min_p")
    try:
        return Sampling(**{name: getattr(args, name) for name in names})
    except ValueError as error:  # the message names a configuration key, and this command has an option instead
        raise ValueError(str(error).replace("rollout.", "--", 1)) from None


def _load(args: argparse.Namespace, devices: Sequence[Any] | None = None) -> tuple[Any, int]:
    """Loads the model and compiles its programs.

    Args:
      args: arguments of the command.
      devices: devices of the model; None for all devices of this process.

    Returns:
      (a podrl.rollout.serving.Serving, most tokens of a prompt and its answer).

    Raises:
      ValueError: there is no model, or the model does not fit --context or --mesh.
    """
    import jax
    import jax.numpy as jnp

    from podrl.data.tokenizer import Tokenizer
    from podrl.engine.config import RolloutConfig
    from podrl.mesh.build import make_decoding_mesh
    from podrl.models.pretrained import check_positions, check_vocab
    from podrl.rollout.serving import Serving
    from podrl.rollout.worker import RolloutWorker
    from podrl.types import Policy

    mesh = make_decoding_mesh(args.mesh, devices or jax.local_devices(), key="--mesh")
    dtype = jnp.dtype(args.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16"))
    with announce_if_long(f"Reading the weights in {args.model}", write_line):
        model, params, directory = _load_model(args.model, mesh, dtype)
    tokenizer = Tokenizer.load(directory)
    check_vocab(model, tokenizer.vocab_size)
    context = min(model.max_length, _CONTEXT) if args.context is None else args.context
    check_positions(model, context - 1, context, lower="lower --context.")
    # A prompt may fill the context except for its last token, because an answer has at least one token.
    config = RolloutConfig(
        max_prompt_length=context - 1, max_tokens_to_generate=1, kv_cache_size=context, lanes=args.lanes
    )
    tokens = {"pad_id": tokenizer.pad_id, "eos_ids": tokenizer.eos_ids, "decode": tokenizer.decode}
    worker = RolloutWorker(model, mesh, config, seed=args.seed, **tokens)
    worker.warm_up(params, write_line)
    defaults = {"sampling": _sampling(args), "seed": args.seed}
    return Serving(worker, Policy(params, 0), tokenizer, parser=args.parser, history=args.history, **defaults), context


def _load_model(name: str, mesh: Any, dtype: Any) -> tuple[Any, Any, Any]:
    """Loads the model that --model names.

    Returns:
      (configuration, weights on the mesh, directory of the tokenizer).

    Raises:
      ValueError: --model names no directory, or the run of a reward model.
    """
    import jax

    from podrl.export import load_run
    from podrl.models import hf_load, lora, parameters

    if (pathlib.Path(name) / "checkpoints").is_dir():
        run, _, params = load_run(locate(name))
        if run.scores:
            raise ValueError(f"--model={name} is the run of a reward model, which cannot generate: give a policy.")
        config = run.config
        if config.lora.rank:
            config, params = lora.merge(params, config)
        shapes = parameters.abstract_params(config, mesh, dtype)
        placed = jax.tree.map(lambda x, shape: jax.device_put(x.astype(shape.dtype), shape.sharding), params, shapes)
        return config, placed, run.tokenizer
    directory = locate(hub.local(name))
    if not directory.is_dir():
        raise ValueError(
            f"--model={name} is not a directory: give a Hugging Face directory, ORG/NAME of the hub, the directory of "
            f"a run, or {' or '.join(hub.EMBEDDED)}."
        )
    config, params = hf_load.load(directory, mesh, dtype)
    return config, params, directory


if __name__ == "__main__":
    signals.leave_on_signals(unwind=False, words=lambda: "before the model was ready; the same command starts again.")
    sys.exit(main(sys.argv[1:]))
