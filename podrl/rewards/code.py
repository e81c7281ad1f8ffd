"""Scores programs by the tests of their record, each in a sandbox without network: functions, or what scripts print."""

import dataclasses
import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from podrl.config import Count, Natural, Positive, Workers, section
from podrl.rewards.answers import closed_answer
from podrl.rewards.sandbox.host import Sandboxes

# A fence that opens a block: its language, if any, ends the line. One that closes it stands alone, or before a tag.
_OPENS = re.compile(r"(?<![`~])(`{3,}+|~{3,}+)[ \t]*+([^\s`]*+)[^`]*+$")
_CLOSES = re.compile(r"[ \t]*+(`{3,}+|~{3,}+)[ \t]*+(?:<.*)?$")
_PYTHON = re.compile(r"\W*(?:i?python|py)[0-9.]*\W*", re.IGNORECASE)
_LIKE_CODE = re.compile(
    r"(?m)^[ \t]*+(?:(?:async )?def \w+\(|class \w+[:(]|import \w|from [\w.]+ import |print\(|\w+ ?=(?!=))"
)
_log = logging.getLogger(__name__)
_LEAVE_S = 5.0  # of every sandbox after its programs
_START_S = 60.0  # of all sandboxes of a call, on a busy machine


@section("reward.code")
@dataclasses.dataclass(frozen=True)
class CodeConfig:
    """Settings of the built-in function 'code': where the tests are, and what a program may take.

    Attributes:
      tests: the record's field with its tests: Python statements that fail by raising, such as MBPP's assertions
        ('test_list' there), or pairs {"input": ..., "output": ...} of what a script reads and prints. The list itself,
        or JSON of it; also APPS' {"inputs": [...], "outputs": [...]}.
      setup: the record's field with Python to run before its tests, such as imports; records may lack it.
      score: 1 if 'all' tests pass, else 0; or the 'share' of tests that pass.
      memory_mb: address space of a program, in MiB. It can start no other process.
      cpu_s: seconds of processor time of one run of a program.
      wall_s: seconds for all tests of a sample, however busy the machine is.
      threads: threads of a program beside its first.
      file_mb: size of one file, and of what a script prints, in MiB.
      disk_mb: size of its /tmp, the only place where it can write, in MiB of memory.
      at_once: sandboxes at once, in each of reward.workers.
      packages: directories that programs may import from beside the standard library; they can read all that is there.
    """

    tests: str = "tests"
    setup: str = "setup"
    score: Literal["all", "share"] = "all"
    memory_mb: Count = 512
    cpu_s: Count = 5
    wall_s: Positive = 60.0
    threads: Natural = 16
    file_mb: Count = 16
    disk_mb: Count = 64
    at_once: Workers = 64
    packages: tuple[str, ...] = ()

    def longest_s(self, samples: int) -> float:
        """Seconds within which a call of so many samples has ended, whatever the programs do."""
        return -(-samples // self.at_once) * (self.wall_s + _LEAVE_S) + _START_S


class CodeTests:
    """The reward function 'code', with its settings; a worker makes one of them.

    Attributes:
      reads: fields that every record must have.
    """

    def __init__(self, **settings: Any) -> None:
        """Starts the process that starts sandboxes.

        Args:
          settings: fields of a CodeConfig.

        Raises:
          podrl.rewards.sandbox.host.RefusedError: this host can isolate no program.
        """
        self._config = config = CodeConfig(**settings)
        self.reads = (config.tests,)
        limits = {"memory_mb": config.memory_mb, "cpu_s": config.cpu_s, "wall_s": config.wall_s}
        limits |= {"threads": config.threads, "file_mb": config.file_mb, "disk_mb": config.disk_mb}
        self._sandboxes = Sandboxes(limits, at_once=config.at_once, packages=config.packages)
        self._told = False

    def __call__(self, prompts: Sequence[str], completions: Sequence[str], **fields: Any) -> list[float]:
        """Scores every completion from 0 to 1 by the tests of its record.

        Raises:
          ValueError: a record without tests, or with a test that no program can pass.
        """
        del prompts
        config = self._config
        if config.tests not in fields:
            raise ValueError(f"the records have no field {config.tests!r} (reward.code.tests) with tests")
        tests = [tests_of(value, config.tests) for value in fields[config.tests]]
        setups = fields.get(config.setup) or [""] * len(completions)
        jobs = [
            {"program": code_of(text), "tests": own, "setup": str(setup or ""), "all": config.score == "share"}
            for text, own, setup in zip(completions, tests, setups, strict=True)
        ]
        rewards = []
        for own, verdict in zip(tests, self._sandboxes.test(jobs), strict=True):
            if "error" in verdict or "refused" in verdict:
                raise ValueError(verdict.get("error") or f"a sandbox was refused: {verdict['refused']}")
            self._tell(verdict)
            share = sum(verdict["passed"]) / len(own)
            rewards.append(share if config.score == "share" else float(share == 1))
        return rewards

    def _tell(self, verdict: Mapping[str, Any]) -> None:
        """Says once that tests may be unusable: whether they are depends on what the program answered before."""
        if verdict.get("unusable") and not self._told:
            self._told = True
            _log.warning(
                "A sample failed a test for this reason: %s. If its tests (reward.code.tests) always do so, no program "
                "passes them.",
                verdict["unusable"],
            )

    def close(self) -> None:
        """Ends the sandboxes."""
        self._sandboxes.close()


def code_of(completion: str) -> str:
    """The program in a completion: its last fenced block of Python, those between the last answer tags before others.

    Without a block of Python it is the last block without a language, those that look like code before others; then the
    last block of any language. Without blocks it is what is between the answer tags, or all of the completion.
    """
    answer = closed_answer(completion)
    if answer is not None and not _blocks(answer) and _LIKE_CODE.search(answer):
        return answer
    if blocks := _blocks(answer or "") or _blocks(completion):
        return blocks[max(range(len(blocks)), key=lambda i: (_rank(*blocks[i]), i))][1]
    return completion if answer is None else answer


def _rank(language: str, body: str) -> int:
    """How likely a fenced block is the program."""
    if _PYTHON.fullmatch(language):
        return 3
    return 0 if language else 2 if _LIKE_CODE.search(body) else 1


def _blocks(text: str) -> list[tuple[str, str]]:
    """The fenced blocks of Markdown that hold anything, by language and text.

    As in CommonMark, a fence closes a block of the same or a shorter fence, and is not indented by more than 3 further
    spaces. A fence with a language opens a block even where another was not closed. A block that no line closes ends
    with the first of its lines that ends in a fence, or where the next block or the end of the text is.
    """
    found: list[_Block] = []
    for line in text.split("\n"):
        spaces = len(line) - len(line.lstrip())
        opens, closes = _OPENS.search(line), _CLOSES.match(line)
        inside = found[-1] if found and not found[-1].closed else None
        if inside is None:
            if opens:
                found.append(_Block(opens[1], opens[2], spaces))
            continue
        mine = spaces <= inside.indent + 3
        if mine and closes and closes[1].startswith(inside.fence):
            inside.closed = True
        elif mine and opens and opens[2] and opens[1].startswith(inside.fence) and not line[: opens.start()].strip():
            found.append(_Block(opens[1], opens[2], spaces))
        else:
            inside.lines.append(line[min(inside.indent, spaces) :].removesuffix("\r"))
    return [(block.language, body) for block in found if (body := block.body()).strip()]


@dataclasses.dataclass
class _Block:
    """A fenced block: its fence, language and indentation in spaces, its lines, and whether a line closed it."""

    fence: str
    language: str
    indent: int
    lines: list[str] = dataclasses.field(default_factory=list)
    closed: bool = False

    def body(self) -> str:
        ends = (i for i, line in enumerate(self.lines) if line.rstrip().endswith(self.fence))
        if not self.closed and (end := next(ends, None)) is not None:
            self.lines[end:] = [self.lines[end].rstrip().removesuffix(self.fence)]
        return "\n".join(self.lines).rstrip("\n") + "\n"


def tests_of(value: Any, field: str) -> list[Any]:
    """A record's tests: texts, or mappings of 'input' and 'output'.

    Raises:
      ValueError: these are no tests.
    """
    tests: Any = value
    if isinstance(value, str):
        try:
            tests = json.loads(value)
        except json.JSONDecodeError:
            tests = [value]
    if isinstance(tests, Mapping) and {"inputs", "outputs"} <= tests.keys():
        pairs = zip(tests["inputs"], tests["outputs"], strict=True)
        tests = [{"input": given, "output": wanted} for given, wanted in pairs]
    tests = tests if isinstance(tests, list) and tests else [None]
    if all(isinstance(test, str) and test.strip() for test in tests):
        return tests
    if all(
        isinstance(test, Mapping) and {type(test.get(side)) for side in ("input", "output")} == {str} for test in tests
    ):
        return [{"input": test["input"], "output": test["output"]} for test in tests]
    raise ValueError(
        f"the field {field!r} (reward.code.tests) is {str(value)[:120]!r}: it must hold a list of Python "
        'statements, or of {"input": text, "output": text}'
    )
