"""Compares every form of attention with its definition on a device: `python -m benchmarks kernels`."""

import argparse
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.model import fake_devices

_MEMBERS = 4  # number of lanes that share a page in one read
_BLOCK = 64  # a multiple of the number of reads that XLA's form of decoding computes at once


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks kernels", description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a row of training")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv_heads", type=int, default=8)
    parser.add_argument("--head_dim", type=int, default=128)
    parser.add_argument("--window", type=int, default=1024, help="tokens of the attention window")
    parser.add_argument("--lanes", type=int, default=32, help="lanes of decoding")
    parser.add_argument("--pages", type=int, default=16, help="pages of a lane and of a prompt, 64 tokens each")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--devices", type=int, default=1, help="faked CPU devices where there is no accelerator")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def run(argv: Sequence[str]) -> dict[str, Any]:
    """Compares every form of attention that a job may use with the definition of attention, on random values.

    A TPU has podrl's kernel for shared prompts, JAX's splash attention, and podrl's kernel for decoding; a GPU has one
    kernel, for decoding. The blockwise form and the plain form of decoding are XLA's, on every device. On a CPU all
    kernels run in Pallas' interpreter, which only shows that this command works.

    Returns:
      FORM_error: for each form, the largest absolute difference of its outputs and gradients from the definition in
        float32, divided by the largest absolute value.
      reference_error: the same for the definition itself in `--dtype`: the error that rounding alone causes.
    """
    args = _parser().parse_args(argv)
    fake_devices(args.devices)
    return {**_training(args), **_decoding(args)}


def _training(args: argparse.Namespace) -> dict[str, float]:
    import jax
    import jax.numpy as jnp

    from podrl.models.attention import attention
    from podrl.models.config import GLOBAL_WINDOW

    backend = jax.default_backend()
    interpret = backend == "cpu"
    keys = jax.random.split(jax.random.key(0), 4)
    T, H = args.tokens, args.head_dim
    heads = (args.heads, args.kv_heads, args.kv_heads, args.heads)
    q, k, v, weight = (jax.random.normal(key, (1, T, n, H)) for key, n in zip(keys, heads, strict=True))
    q = q * H**-0.5
    segment, shared = _rows(T)
    worst: dict[str, float] = {}
    for window in (GLOBAL_WINDOW, args.window):
        for form in ("reference", "blockwise", *(("splash", "prefix") if backend != "gpu" else ())):
            how: dict[str, Any] = {"softcap": 0.0, "form": "dense" if form == "reference" else form}
            if form == "splash":
                how |= {"windows": (window,), "interpret": interpret}
            if form == "prefix":
                how["interpret"] = interpret
            layout = (segment, None if form == "splash" else shared)

            def values(run: Callable[..., Any], dtype: str, layout: Any, window: int = window) -> list[np.ndarray]:
                def total(q: Any, k: Any, v: Any) -> Any:
                    told = {"window": jnp.int32(window), "shared": layout[1]}
                    out = run(*(x.astype(dtype) for x in (q, k, v)), layout[0], **told)
                    out = jnp.where((layout[0] > 0)[..., None, None], out, 0).astype(jnp.float32)
                    return jnp.sum(out * weight), out

                grads, out = jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))(q, k, v)
                return [np.asarray(x, np.float32) for x in (out, *grads)]

            found = values(functools.partial(attention, **how), args.dtype, layout)
            exact = values(functools.partial(attention, softcap=0.0, form="dense"), "float32", layout)
            worst[form] = max(worst.get(form, 0.0), *map(_error, found, exact))
    return {f"{form}_error": error for form, error in worst.items()}


def _rows(T: int) -> tuple[Any, Any]:
    """Makes a row of one prompt, its three samples and padding: (segments, how the samples share the prompt)."""
    import jax.numpy as jnp

    prompt, sample = T // 4, T // 5
    segment_T, last_T, position_T = np.zeros((3, T), np.int32)
    segment_T[:prompt], last_T[:prompt], position_T[:prompt] = 1, 4, np.arange(prompt)
    for i in range(3):
        own = slice(prompt + i * sample, prompt + (i + 1) * sample)
        segment_T[own], last_T[own], position_T[own] = i + 2, i + 2, prompt + np.arange(sample)
    segment_BT, last_BT, position_BT = (jnp.asarray(x[None]) for x in (segment_T, last_T, position_T))
    return segment_BT, (last_BT, position_BT)


def _decoding(args: argparse.Namespace) -> dict[str, float]:
    import jax
    import jax.numpy as jnp

    from podrl.engine import attention
    from podrl.models.config import GLOBAL_WINDOW

    R, K, N, H, C = args.lanes, args.kv_heads, args.heads, args.head_dim, 64
    reads, pages, position = _reads(R, args.pages, C)
    keys = jax.random.split(jax.random.key(1), 6)
    q = jax.random.normal(keys[0], (R, N, H)) * H**-0.5
    pools = [jax.random.normal(key, (1, pages, K, C, H)) for key in keys[1:3]]
    shape = (R, K, N // K)
    mass = 1 + jax.random.normal(keys[3], shape) ** 2
    recent = attention.PartialSoftmax(jax.random.normal(keys[4], shape), mass, jax.random.normal(keys[5], (*shape, H)))
    scratch = attention.make_scratch(reads, K, N, H)

    def kernel(q: Any, keys: Any, values: Any, window: Any) -> Any:
        backend = jax.default_backend()
        how = {"window": window, "softcap": 0.0, "gpu": backend == "gpu", "interpret": backend == "cpu"}
        return attention.kernel_attention(q, 0, keys, values, recent, reads, position, **how)

    def plain(q: Any, keys: Any, values: Any, window: Any) -> Any:
        how = {"window": window, "softcap": 0.0}
        return attention.decode_attention(q, jnp.int32(0), keys, values, recent, reads, scratch, position, **how)[0]

    def values(form: Callable[..., Any], dtype: str, window: int) -> np.ndarray:
        rounded = [x.astype(dtype) for x in (q, *pools)]
        return np.asarray(jax.jit(form)(*rounded, jnp.int32(window)), np.float32)

    worst = {"decode": 0.0, "decode_kernel": 0.0}
    for window in (GLOBAL_WINDOW, args.window):
        with jax.default_matmul_precision("highest"):
            exact = values(plain, "float32", window)
        for name, form in (("decode", plain), ("decode_kernel", kernel)):
            worst[name] = max(worst[name], _error(values(form, args.dtype, window), exact))
    return {f"{name}_error": error for name, error in worst.items()}


def _reads(R: int, own_pages: int, C: int) -> tuple[Any, int, Any]:
    """Makes lanes in groups of four that share a prompt and have pages of their own: (reads, pages, position_R)."""
    import jax.numpy as jnp

    from podrl.engine.reads import LaneReads, Page, ReadShape

    free = itertools.count()
    groups = -(-R // _MEMBERS)

    def pages(start: int, tokens: int) -> list[Page]:
        return [Page(next(free), start + at, min(C, tokens - at)) for at in range(0, tokens, C)]

    prompt = own_pages * C - 3
    prompts = [pages(0, prompt) for _ in range(groups)]
    lengths = [1 + (7 * lane + 3) % (own_pages * C) for lane in range(R)]
    seated = {
        lane: LaneReads(lane // _MEMBERS, prompts[lane // _MEMBERS], pages(prompt, length))
        for lane, length in enumerate(lengths)
    }
    whole = lambda reads: -(-reads // _BLOCK) * _BLOCK  # noqa: E731
    shape = ReadShape(lanes=R, shared=whole(groups * own_pages), own=whole(R * (own_pages + 1)), members=_MEMBERS)
    flat_I = np.zeros(shape.size, np.int32)
    count = next(free) + 1
    shape.fill(flat_I, seated, count - 1)
    return shape.split(jnp.asarray(flat_I)), count, jnp.asarray([prompt + length for length in lengths])


def _error(found: np.ndarray, exact: np.ndarray) -> float:
    return float(np.abs(found - exact).max() / np.abs(exact).max())
