"""Every configuration key is explained, on the page of all keys and by `python -m podrl.launch --help_config`."""

import dataclasses
import pathlib
import re

import pytest

from podrl.config import COMMON_NAMES, Count, build, elsewhere, merge, section
from podrl.job.config import KINDS, lacking, unset
from podrl.job.keys import all_keys, help_text, meanings, page
from podrl.trainer.config import RLTrainingConfig

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "reference" / "keys.md"
KEYS = all_keys()


def test_every_key_has_a_meaning():
    assert [key.path for key in KEYS if not key.meaning] == []


def test_the_page_of_all_keys_is_current():
    assert PAGE.read_text() == page(), "run: python -m podrl.job.keys docs/reference/keys.md"


@pytest.mark.parametrize("algorithm", KINDS)
def test_every_key_that_a_configuration_starts_with_is_listed(algorithm):
    listed = {key.path for key in KEYS}

    def paths(values, prefix=""):
        for name, value in values.items():
            group = isinstance(value, dict) and prefix + name not in listed
            yield from paths(value, f"{prefix}{name}.") if group else [prefix + name]

    assert sorted(set(paths(unset(algorithm))) - listed) == []


def test_no_key_is_listed_twice():
    assert len(KEYS) == len({key.path for key in KEYS}) > 300


def test_a_key_has_type_range_default_and_readers():
    known = {key.path: key for key in KEYS}
    epsilon = known["grpo.epsilon_high"]
    assert epsilon.default == "None" and epsilon.presets["dapo"] == "0.28" and epsilon.read_by == "grpo"
    assert known["rollout.temperature"].presets["sft"] == "1.0" and known["seed"].read_by == "all"
    assert known["seed"].kind == "a whole number in [0, 4294967295]"
    assert known["roles.critic.mesh"].default == "'trainer'" and known["roles.critic.mesh"].read_by == "ppo"
    assert known["data.sources[].path"].default == ""  # '' stands for a key that has no default


def test_meanings_are_inherited_and_go_on_over_lines():
    @dataclasses.dataclass(frozen=True)
    class Base:
        """Settings.

        Attributes:
          one, two: numbers of samples,
            on two lines: with a colon.
          three: a meaning that the subclass replaces.
        """

        one: Count = 1

    @section("mine")
    @dataclasses.dataclass(frozen=True)
    class Mine(Base):
        """More settings.

        Attributes:
          three: its own.

        Raises:
          four: no attribute.
        """

    both = "numbers of samples, on two lines: with a colon."
    assert meanings(Mine) == {"one": both, "two": both, "three": "its own."}


def test_the_help_tells_the_keys_below_a_prefix():
    text = help_text("--config.data.cu")
    assert text.startswith("--config.data.curriculum.") and "read by grpo, ppo" in text
    assert "--config.seed" not in text and "--config.seed" in help_text()
    assert max(map(len, help_text().splitlines())) <= 100


def test_the_help_refuses_a_prefix_of_no_key():
    with pytest.raises(ValueError, match=r"no key begins with this. Did you mean 'trainer.learning_rate'"):
        help_text("trainer.lerning_rate")
    with pytest.raises(ValueError, match=r"Did you mean 'trainer\.'\?"):
        help_text("trainr.")


def test_a_key_without_a_default_can_be_set_by_the_flag_that_its_error_names():
    without = [key.path for key in KEYS if key.default == "" and "[]" not in key.path]
    assert list(lacking({"trainer": {}})) == without == ["trainer.eval_every_n_steps"]
    assert lacking({"trainer": {"eval_every_n_steps": 5}}) == {}
    said = "config.trainer lacks eval_every_n_steps: set --config.trainer.eval_every_n_steps=VALUE. 0 evaluates only "
    with pytest.raises(ValueError, match=re.escape(said)):
        build(RLTrainingConfig, {"max_steps": 1}, "config.trainer")


@pytest.mark.parametrize("name", COMMON_NAMES)
def test_a_name_of_another_system_suggests_a_key_of_a_job(name):
    key = COMMON_NAMES[name]
    assert key in {listed.path for listed in KEYS}
    config = merge(unset("grpo"), {"trainer": {"eval_every_n_steps": 0}})  # a key without a default
    assert elsewhere(name, config, "--config.") == f" Did you mean '--config.{key}'?"


def test_a_name_of_another_system_suggests_no_key_that_a_job_lacks():
    assert elsewhere("lr", {"data": {"path": "x"}}) == ""
    assert elsewhere("lr", {"data": {"lr": 1}}) == " Did you mean 'data.lr'?"


def test_a_name_of_another_system_is_answered_in_python_too():
    with pytest.raises(ValueError, match=r"RLTrainingConfig has no field lr. Did you mean 'learning_rate'\?"):
        RLTrainingConfig(lr=1e-4)  # pyright: ignore[reportCallIssue]
