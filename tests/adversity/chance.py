"""A tool that answers otherwise in every life of a run, as its working directory's file `world` says."""

import hashlib
import pathlib


def calculator(query: str) -> str:
    """A number."""
    world = pathlib.Path("world").read_text()
    return str(int(hashlib.sha256(f"{world} {query}".encode()).hexdigest(), 16) % 10_000_000)
