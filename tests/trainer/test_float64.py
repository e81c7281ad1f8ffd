"""Compares gradients in float64, where packing, micro-batches and meshes change nothing above 1e-12.

So the differences in float32 are only rounding.
"""

import os
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent
TESTS = (
    "test_step.py::test_packing_and_micro_batches_do_not_change_the_update",
    "test_step.py::test_mesh_does_not_change_the_update",
    "test_step.py::test_gradient_equals_the_naive_one",
    *("test_critic.py::test_gradient_equals_the_naive_one_on_any_mesh_and_packing",),
    "test_shared_prompts.py::test_the_update_is_the_same[24-fsdp=1-0]",
    "test_shared_prompts.py::test_the_critics_update_is_the_same",
    "test_pieces.py::test_the_update_is_that_of_separate_rows",
    "test_pieces.py::test_random_trees_have_the_gradient_of_separate_pieces",
    *("../learner/test_source_settings.py::test_an_update_of_a_mixture_is_the_sum_of_those_of_its_components",),
    *("../learner/test_source_settings.py::test_the_order_and_the_packing_of_samples_do_not_matter",),
)


@pytest.mark.nightly("podrl/trainer", "podrl/algorithms", "podrl/models")
@pytest.mark.slow
def test_gradients_agree_to_1e_12_in_float64():
    """The test files in `TESTS` run in a process in which podrl computes in float64; there they compare gradients to
    1e-12."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "pytest", "-p", "in_float64", "-p", "no:cacheprovider", "-rA"]
    done = subprocess.run(
        [*command, *(str(HERE / name) for name in TESTS)], env=environment, capture_output=True, text=True, timeout=1800
    )
    if done.returncode:
        pytest.fail(done.stdout[-6000:] + done.stderr[-2000:])
    assert "25 passed" in done.stdout, done.stdout
