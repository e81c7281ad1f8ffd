"""The examples of docs/rewards.md run exactly as printed."""

import pathlib
import re
import shlex

import pytest

from podrl.rewards.compose import RewardConfig

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "rewards.md").read_text()


def python_blocks() -> list[str]:
    """Finds the page's python blocks. A fence inside a block is part of a string there, so it never begins a line."""
    return re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("number", range(len(python_blocks())))
def test_the_examples_say_what_happens(number):
    exec(compile(python_blocks()[number], "docs/rewards.md", "exec"), {"__name__": "example"})


def test_the_commands_name_settings():
    lines = "\n".join(re.findall(r"^```bash\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE))
    commands = [line for line in lines.splitlines() if line.startswith("python -m podrl.launch")]
    assert commands
    for command in commands:
        for flag in shlex.split(command):
            if flag.startswith("--config.reward."):
                found = RewardConfig()
                for part in flag.removeprefix("--config.reward.").partition("=")[0].split("."):
                    found = getattr(found, part)
