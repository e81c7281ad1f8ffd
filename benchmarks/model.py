"""Options shared by the benchmarks: a random model, and faked devices to run it on."""

import argparse
import dataclasses
import os
from typing import Any

from podrl.runtime import environment

SMALL = {"layers": 3, "dim": 128, "ffn": 256, "heads": 4, "kv_heads": 2, "head_dim": 32, "vocab": 384}


def add_options(parser: argparse.ArgumentParser, **sizes: int) -> None:
    """Adds options for the model's sizes; `sizes` are defaults that replace values of SMALL."""
    parser.add_argument("--size", default="", help="a published size (podrl/models/sizes.py) in the place of these:")
    for name, default in (SMALL | sizes).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--experts",
        type=count_and_chosen,
        default=None,
        metavar="COUNT:CHOSEN",
        help="experts of each layer, and how many of them compute a token; these are together as wide as --ffn",
    )
    parser.add_argument("--window", type=int, default=4096, help="attention window of every other layer")
    parser.add_argument("--lora_rank", type=int, default=0)
    parser.add_argument("--devices", type=int, default=8, help="faked CPU devices where there is no accelerator")


def model_of(args: argparse.Namespace) -> Any:
    """Builds the ModelConfig that the options describe: a model of a published size, or a model like Gemma 2.

    Raises:
      ValueError: the size is unknown, --experts is given with a published size, or experts cannot be equally wide.
    """
    if args.experts and args.size:
        raise ValueError(f"--size={args.size} has its own number of experts: leave out --experts or --size.")
    from podrl.models.config import LoraConfig

    model = _published(args) if args.size else _like_gemma2(args)
    return dataclasses.replace(model, lora=LoraConfig(rank=args.lora_rank)) if args.lora_rank else model


def _published(args: argparse.Namespace) -> Any:
    from podrl.models import sizes

    model = sizes.config_of(args.size)
    args.vocab = model.vocab_size  # benchmarks draw the ids of random tokens below it
    return model


def _like_gemma2(args: argparse.Namespace) -> Any:
    from podrl.models.config import Experts, gemma2_config

    model = gemma2_config(
        vocab_size=args.vocab,
        num_layers=args.layers,
        model_dim=args.dim,
        ffn_dim=args.ffn,
        num_heads=args.heads,
        num_kv_heads=args.kv_heads,
        head_dim=args.head_dim,
        window=args.window,
    )
    if args.experts is None:
        return model
    count, chosen = args.experts
    if args.ffn % chosen:
        raise ValueError(f"--ffn={args.ffn} is the width of {chosen} chosen experts together: give a multiple of it.")
    return dataclasses.replace(model, experts=Experts(count, chosen, args.ffn // chosen))


def count_and_chosen(text: str) -> tuple[int, int]:
    """Parses 'COUNT:CHOSEN': (number of experts, number of experts that compute a token)."""
    count, _, chosen = text.partition(":")
    return int(count), int(chosen)


def number_range(text: str) -> tuple[int, int]:
    """Parses 'LOW:HIGH', or one number for both."""
    low, _, high = text.partition(":")
    return int(low), int(high or low)


def fake_devices(count: int) -> None:
    """Makes jax fake `count` CPU devices; call it before jax is imported.

    A number of devices in XLA_FLAGS takes precedence.
    """
    environment.prepare(os.environ, fake_devices=count)
