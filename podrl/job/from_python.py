"""The launch command as a function, for scripts and notebooks: the same job with the same files.

Nothing here imports jax before the environment is prepared for it.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from podrl.config import Devices, check, elsewhere, known_arguments, merge
from podrl.job.config_file import default_workdir, find_config, load_config
from podrl.mappings import ConfigValues
from podrl.runtime import detect
from podrl.runtime import environment as process_environment
from podrl.workers import child, user_objects


@known_arguments
def run(
    config: str,
    overrides: ConfigValues | None = None,
    *,
    workdir: str | os.PathLike | None = None,
    reward_fns: Callable | str | Sequence[Callable | str] = (),
    environment: Any = None,
    loss: Callable | str | None = None,
    advantage: Callable | str | None = None,
) -> int:
    """Trains the job that a configuration describes, as `python -m podrl.launch --config=...` in one process does.

    Equal settings give equal metrics, bit for bit. The same call resumes a run that ended early.

    Args:
      config: 'file.py' or 'file.py:variant', looked up at this path, then in configs/, then among podrl's own files.
      overrides: values of keys, by dotted path ('trainer.max_steps') or in nested mappings.
      workdir: the run directory, local or gs://; by default runs/<config>.
      reward_fns: functions `(prompts, completions, **fields) -> list[float]`, or their names; instead of reward.fns.
      environment: environment of all samples, 'file.py:Name', a ToolEnvironment, or an EnvironmentConfig; instead of
        the configuration's env.
      loss: the token loss of the policy, a function `(logprob_BT, old_logprob_BT, advantage_BT, *, numbers...)` or its
        name; instead of policy_loss_fn of the algorithm's section.
      advantage: the advantage, a function `(reward_PG, *, numbers...)` or its name; instead of advantage_estimator.

    Returns:
      The exit code of the command: 0 done, 75 stopped by a signal after saving.

    Raises:
      ValueError: a key, value or argument is not allowed, or this process is one of several.
    """
    child.refuse_inside()
    path = find_config(config)
    of_file, changed = load_config(path).to_dict(), _nested(overrides or {})
    first = merge(of_file, changed)
    _refuse_pods()
    devices = check(first.get("fake_devices", 0), Devices, "fake_devices")
    process_environment.prepare(os.environ, fake_devices=devices)
    process_environment.enable_compile_cache(os.environ, first.get("compile_cache", "auto"))
    import jax

    from podrl.job import job
    from podrl.job.config import complete, section_of
    from podrl.learner.run_environments import environment_config
    from podrl.trainer.custom import ARGUMENTS

    for name, kind in (("compilation_cache_dir", str), ("persistent_cache_min_compile_time_secs", float)):
        if (text := os.environ.get(f"JAX_{name.upper()}")) is not None:
            jax.config.update(f"jax_{name}", kind(text))  # jax may have been imported already
    algorithm = first.get("algorithm", "grpo")
    section = section_of(algorithm)
    for name, function in (("policy_loss_fn", loss), ("advantage_estimator", advantage)):
        if function is not None:
            changed = merge(changed, {section: {name: user_objects.name_of(function) or function}})
    own = {name: value for name, value in changed.get(section, {}).items() if name in ARGUMENTS}
    whole = ConfigDict(complete(merge(of_file, {"algorithm": algorithm, section: own}))).to_dict()
    for key in changed.keys() - whole.keys():
        if hint := elsewhere(key, whole):
            raise ValueError(f"The configuration has no key {key!r}.{hint}")
    values = merge(whole, changed)
    if fns := (reward_fns,) if callable(reward_fns) or isinstance(reward_fns, str) else tuple(reward_fns):
        values = merge(values, {"reward": {"fns": tuple(user_objects.name_of(fn) or fn for fn in fns)}})
    if environment is not None:
        values["env"] = dataclasses.asdict(environment_config(environment))
    return job.run(values, os.fspath(workdir or default_workdir(path)), command=f"the same podrl.run({config!r}, ...)")


def _nested(overrides: ConfigValues) -> ConfigValues:
    """Turns dotted keys into nested mappings."""
    nested: dict[str, Any] = {}
    for key, value in overrides.items():
        below: Any = _nested(value) if isinstance(value, Mapping) else value
        for name in reversed(key.split(".")):
            below = {name: below}
        nested = merge(nested, below)
    return nested


def _refuse_pods() -> None:
    cluster = detect.detect(os.environ, topology="auto", metadata=detect.tpu_vm_metadata(os.environ))
    if cluster.process_count > 1 or cluster.topology != "single":
        raise ValueError(
            f"podrl.run trains in one process, and this is one of {cluster.process_count} (topology "
            f"{cluster.topology}): start the job with python -m podrl.launch, which joins them."
        )
