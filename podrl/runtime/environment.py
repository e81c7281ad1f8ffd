"""What must be in the environment before jax is imported."""

import sys
from collections.abc import MutableMapping

_FAKE = "--xla_force_host_platform_device_count"


def prepare(env: MutableMapping[str, str], *, fake_devices: int) -> None:
    """Asks for faked CPU devices where no accelerator is named; appends to XLA_FLAGS, never replaces.

    A count already in XLA_FLAGS wins, and so does JAX_NUM_CPU_DEVICES (jax lets it beat XLA_FLAGS silently). The flag
    concerns only the CPU platform: on a machine with a GPU or TPU it changes nothing.

    Args:
      env: usually os.environ.
      fake_devices: CPU devices to fake; 0 leaves the environment alone.

    Raises:
      RuntimeError: jax is imported already, so the flags would be ignored.
    """
    env.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    if fake_devices <= 0 or _FAKE in env.get("XLA_FLAGS", "") or "JAX_NUM_CPU_DEVICES" in env:
        return
    if "jax" in sys.modules:
        raise RuntimeError(
            "jax was initialised before podrl.launch, so XLA_FLAGS can no longer take effect: start the job with "
            "`python -m podrl.launch`, or set XLA_FLAGS yourself before the first import of jax."
        )
    env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} {_FAKE}={fake_devices}".strip()
