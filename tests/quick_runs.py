"""How tests compile with least effort, in their own process and in those that they start.

A test stays with optimised programs (mark `optimised`) where two of them that are written differently must agree to the
last bits, or nearly, and where a user's run is what it tests.
"""

from collections.abc import Mapping

# XLA's emitters of fused loops run many passes over every loop. Without other optimisations they take half of the time.
NO_EMITTERS = "--xla_cpu_use_fusion_emitters=false"
QUICK_RUNS = "JAX_DISABLE_MOST_OPTIMIZATIONS"  # jax's variable, in this process set while processes compile quickly


def process_environment(inherited: Mapping[str, str], **more: str) -> dict[str, str]:
    """Returns an environment for processes of tests, with no faked devices but those that `more` asks for."""
    environment = {name: value for name, value in inherited.items() if name != "XLA_FLAGS"} | more
    if QUICK_RUNS in environment:
        environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {NO_EMITTERS}".strip()
    return environment
