"""Settings with which XLA compiles fastest, for the process of the tests and for processes that tests start.

A test needs optimised programs (mark `optimised`) if it compares differently written programs to the last bits or
nearly so, or if it tests a user's run.
"""

import importlib.metadata
from collections.abc import Mapping

# XLA's emitters of fused loops run many passes over each loop. If other optimisations are off, these passes take half
# of the time of compiling. From jaxlib 0.11 on XLA cannot do without emitters, and a process with this flag ends at
# once.
NO_EMITTERS = "--xla_cpu_use_fusion_emitters=false" if importlib.metadata.version("jaxlib").startswith("0.10.") else ""
# Environment variable of jax; conftest.py sets it while a test runs whose processes must compile quickly.
QUICK_RUNS = "JAX_DISABLE_MOST_OPTIMIZATIONS"


def process_environment(inherited: Mapping[str, str], **more: str) -> dict[str, str]:
    """Returns an environment for a process that a test starts; this process's XLA_FLAGS, which fake eight devices, are
    left out."""
    environment = {name: value for name, value in inherited.items() if name != "XLA_FLAGS"} | more
    if QUICK_RUNS in environment:
        environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {NO_EMITTERS}".strip()
    return environment
