"""Scores programs by their record's tests of functions or of printed text, each in a sandbox without network."""

import dataclasses
import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from podrl.config import Count, Natural, Positive, Workers, section
from podrl.rewards.answers import closed_answer
from podrl.rewards.sandbox.host import Sandboxes
from podrl.rewards.sandbox.messages import ProgramLimits, ProgramTests, ScriptTest, Verdict

# Markdown's fences (``` or ~~~) around code. The language may follow an opening fence; the rest of the line has no
# backtick. A closing fence stands alone on its line, or before a tag.
_OPENS = re.compile(r"(?<![`~])(`{3,}+|~{3,}+)[ \t]*+([^\s`]*+)[ \t]*+([^`]*+)$")
_CLOSES = re.compile(r"[ \t]*+(`{3,}+|~{3,}+)[ \t]*+(?:<.*)?$")
_QUOTE = re.compile(r" {0,3}> ?")  # the mark of a line in a block quote
_LIST_ITEM = re.compile(r"[ \t]*+(?:[-*+]|\d{1,9}[.)])[ \t>]++")
_ONE_LINE = re.compile(
    r"(?<!`)(`{3,}+)(?!`)([^`\n]++)\1(?!`)|(?<!~)(~{3,}+)(?!~)([^~\n]++)\3(?!~)"  # a block that ends on its first line
)
_PYTHON = re.compile(r"\W*+(?:i?python|py)[0-9.]*+\W*+", re.IGNORECASE)
# Names of languages that are not Python. Other names, such as 'solution' and 'sage', may stand for a block of Python.
_OTHER_LANGUAGE = re.compile(
    r"\W*+(?:(?:ba|z|fi)?sh|shell\w*+|console|terminal|cmd|powershell|output|stdout|result|log|json\w*+|ya?ml|toml|ini|csv|"
    r"xml|html|css|markdown|md|latex|tex|diff|sql|java|javascript|js|typescript|ts|c|h|c\+\+|cpp|c#|cs|csharp|go|golang|"
    r"rust|rs|ruby|rb|php|perl|lua|r|julia|kotlin|swift|scala|haskell|dockerfile|makefile|pycon|mermaid)\W*+",
    re.IGNORECASE,
)
_DEFINITION = r"(?:@\w|(?:async )?def \w+\(|class \w+[:(]|import \w|from [\w.]+ import )"
_DEFINES = re.compile(rf"(?m)^[ \t]*+{_DEFINITION}")
_LIKE_CODE = re.compile(rf"(?m)^[ \t]*+(?:{_DEFINITION}|print\(|\w+ ?=(?!=))")
# Matches code on the line of an opening fence. On this line 'title=a.py' is a setting of the block, not code.
_FIRST_LINE = re.compile(rf"{_DEFINITION}|print\(|\w+ = \S")
_log = logging.getLogger(__name__)
_LEAVE_S = 5.0  # seconds that a sandbox may take beyond its program's wall_s
_START_S = 60.0  # upper bound of the seconds in which all sandboxes of a call start, even on a busy machine


@section("reward.code")
@dataclasses.dataclass(frozen=True)
class CodeConfig:
    """Settings of the built-in function 'code': the fields with the tests, and the limits of a program.

    Attributes:
      tests: name of the record's field with the tests. A test is a Python statement that fails by raising, such as an
        assertion in MBPP's field 'test_list'; or it is a pair {"input": ..., "output": ...}, the text that a script
        reads and the text that the script must print. The field holds a list or the JSON of a list. The form of APPS,
        {"inputs": [...], "outputs": [...]}, also works.
      setup: name of the record's field with Python to run before the tests, such as imports; records may lack the
        field.
      score: 1 if 'all' tests pass, else 0; or the 'share' of tests that pass.
      memory_mb: largest address space of a program, in MiB. A program can start no other process.
      cpu_s: longest processor time of one run of a program, in seconds.
      wall_s: longest time of all tests of a sample together, in seconds by the clock, even on a busy machine.
      threads: number of threads that a program may have besides its first thread.
      file_mb: largest size of one file, and of all the text that a script prints, in MiB.
      disk_mb: size of a program's /tmp, the only place where it can write, in MiB of memory.
      at_once: number of sandboxes that run at once in each of the reward.workers processes.
      packages: directories that programs may import from, besides the standard library. Programs can read every file in
        them.
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
        """Computes an upper bound of the seconds of a call for this number of samples, whatever the programs do."""
        return -(-samples // self.at_once) * (self.wall_s + _LEAVE_S) + _START_S


class CodeTests:
    """The reward function 'code', with its settings; every worker makes one.

    Attributes:
      reads: fields that every record must have.
    """

    def __init__(self, **settings: Any) -> None:
        """Starts the process that starts sandboxes.

        Args:
          settings: fields of a CodeConfig.

        Raises:
          podrl.rewards.sandbox.host.RefusedError: this host cannot isolate a program.
        """
        self._config = config = CodeConfig(**settings)
        self.reads = (config.tests,)
        limits: ProgramLimits = {
            "memory_mb": config.memory_mb,
            "cpu_s": config.cpu_s,
            "wall_s": config.wall_s,
            "threads": config.threads,
            "file_mb": config.file_mb,
            "disk_mb": config.disk_mb,
        }
        self._sandboxes = Sandboxes(limits, at_once=config.at_once, packages=config.packages)
        self._warned = False

    def __call__(self, prompts: Sequence[str], completions: Sequence[str], **fields: Any) -> list[float]:
        """Scores every completion from 0 to 1 by the tests of its record.

        Raises:
          ValueError: a record has no tests, or has a test that no program can pass.
        """
        del prompts
        config = self._config
        if config.tests not in fields:
            raise ValueError(f"the records have no field {config.tests!r} (reward.code.tests) with tests")
        tests = [tests_of(value, config.tests) for value in fields[config.tests]]
        setups = fields.get(config.setup) or [""] * len(completions)
        jobs: list[ProgramTests] = [
            {"program": code_of(text), "tests": own, "setup": str(setup or ""), "all": config.score == "share"}
            for text, own, setup in zip(completions, tests, setups, strict=True)
        ]
        rewards = []
        for own, verdict in zip(tests, self._sandboxes.test(jobs), strict=True):
            if "error" in verdict or "refused" in verdict:
                raise ValueError(verdict.get("error") or f"a sandbox was refused: {verdict.get('refused')}")
            self._warn(verdict)
            share = sum(verdict["passed"]) / len(own)
            rewards.append(share if config.score == "share" else float(share == 1))
        return rewards

    def _warn(self, verdict: Verdict) -> None:
        """Warns, once in each worker process, about a failed test if the test may be at fault and not the program.

        The test gave the program a value that is not plain data, such as a function. The test is not refused, because
        it may give other programs plain data only.

        Args:
          verdict: the sandbox's result for one sample; 'unusable' names the fault, '' if there is none.
        """
        if (why := verdict.get("unusable")) and not self._warned:
            self._warned = True
            _log.warning(
                "A sample failed a test for this reason: %s. If its tests (reward.code.tests) always do so, no program "
                "passes them.",
                why,
            )

    def close(self) -> None:
        """Ends the sandboxes."""
        self._sandboxes.close()


def code_of(completion: str) -> str:
    """Finds the program in a completion: the last block of Python, preferably between the last answer tags.

    If no block names Python, the program is the last block of the highest `_rank`. If no block looks like code, text
    between fences on one line also counts as a block. If there is no block, the program is the text between the answer
    tags, or the whole completion.
    """
    answer = closed_answer(completion)
    if answer is not None and not _blocks(answer) and not _ONE_LINE.search(answer) and _LIKE_CODE.search(answer):
        return answer
    blocks = _blocks(answer or "") or _blocks(completion)
    if all(_rank(*block) < 2 for block in blocks):  # no block looks like code, so blocks on one line count too
        blocks = [_inline(found) for text in (completion, answer or "") for found in _ONE_LINE.finditer(text)] + blocks
    if blocks:
        return blocks[max(range(len(blocks)), key=lambda i: (_rank(*blocks[i]), i))][1]
    return completion if answer is None else answer


def _rank(language: str, body: str) -> int:
    """Ranks a fenced block from 0 to 4: a block with a higher rank is more likely to be the program.

    4: the block names Python as its language.
    3: the block defines or imports something, and does not name a known language other than Python.
    2: the block looks like code in another way, and does not name a known language other than Python.
    1: the block names no language.
    0: any other block.
    """
    if _PYTHON.fullmatch(language):
        return 4
    if not _OTHER_LANGUAGE.fullmatch(language):
        if _DEFINES.search(body):
            return 3
        if _LIKE_CODE.search(body):
            return 2
    return 0 if language else 1


def _inline(found: re.Match[str]) -> tuple[str, str]:
    """Returns the language ('' if not named) and the program of a block that ends on its first line."""
    text = (found[2] or found[4]).strip()
    language, _, rest = text.partition(" ")
    named = (
        bool(rest) and not _LIKE_CODE.match(text) and (_PYTHON.fullmatch(language) or _LIKE_CODE.match(rest.strip()))
    )
    return (language, rest.strip() + "\n") if named else ("", text + "\n")


def _blocks(text: str) -> list[tuple[str, str]]:
    """Finds the fenced blocks of Markdown that are not empty, as pairs of language and text.

    A block is closed by a fence of the same character that is at least as long as the opening fence. The closing fence
    may be indented by at most 3 spaces more than the opening fence (CommonMark: by at most 3 spaces in all). In a block
    quote, all lines of a block begin with '>'. A fence with a language opens a block even if the block before is not
    closed. Code after the language on the line of the fence is the first line of the block. If no line closes a block,
    the block ends with its first line that ends in a fence. If there is no such line, the block ends where the next
    block begins or the text ends.
    """
    found: list[_Block] = []
    for whole in text.split("\n"):
        inside = found[-1] if found and not found[-1].closed else None
        line, quotes = _unquoted(whole, inside.quotes if inside else len(whole))
        spaces = len(line) - len(line.lstrip())
        opened, closes = _opened(line, spaces), _CLOSES.match(line)
        if inside is None:
            if opened:
                opened.quotes += quotes
                found.append(opened)
            continue
        mine = spaces <= inside.indent + 3
        if mine and closes and closes[1].startswith(inside.fence):
            inside.closed = True
        elif mine and opened and opened.alone and opened.language and opened.fence.startswith(inside.fence):
            opened.quotes = inside.quotes
            found.append(opened)
        else:
            inside.lines.append(line[min(inside.indent, spaces) :].removesuffix("\r"))
    return [(block.language, body) for block in found if (body := block.body()).strip()]


def _unquoted(line: str, most: int) -> tuple[str, int]:
    """Removes up to `most` marks of block quotes ('>') from the start of a line; returns the rest and their number."""
    end = count = 0
    while count < most and (mark := _QUOTE.match(line, end)):
        end, count = mark.end(), count + 1
    return line[end:], count


def _opened(line: str, indent: int) -> "_Block | None":
    """Returns the block that a line opens, or None; code after the fence or the language is the block's first line."""
    line = _ONE_LINE.sub("", line.removesuffix("\r"))
    # Only the last backticks of a line can open a block. A search from the line's start would take quadratic time.
    fence = _OPENS.search(line, len(line[: line.rfind("`") + 1].rstrip("`")))
    if fence is None:
        return None
    before, language, rest = line[: fence.start()], fence[2], fence[3]
    if _FIRST_LINE.match(line, fence.start(2)):
        language, rest = "", line[fence.start(2) :]
    lines = [rest] if _FIRST_LINE.match(rest) else []
    return _Block(fence[1], language, indent, _quotes_in_list(before), lines, alone=not before.strip())


def _quotes_in_list(before: str) -> int:
    """Counts the block quotes that a list item begins with before a fence, such as 1 for '- > '."""
    return before.count(">") if _LIST_ITEM.fullmatch(before) else 0


@dataclasses.dataclass
class _Block:
    """A fenced block of a completion, while it is read.

    Attributes:
      fence: backticks or tildes that opened the block.
      language: first word after the fence; '' if there is none.
      indent: spaces before the fence.
      quotes: number of block quotes around the block. Each line of the text begins with this number of '>'; they are
        left out of `lines`.
      lines: lines of the block, without the fences.
      alone: True if nothing stands before the fence on its line.
      closed: True once a line has closed the block.
    """

    fence: str
    language: str
    indent: int
    quotes: int
    lines: list[str]
    alone: bool
    closed: bool = False

    def body(self) -> str:
        ends = (i for i, line in enumerate(self.lines) if line.rstrip().endswith(self.fence))
        if not self.closed and (end := next(ends, None)) is not None:
            self.lines[end:] = [self.lines[end].rstrip().removesuffix(self.fence)]
        return "\n".join(self.lines).rstrip("\n") + "\n"


def tests_of(value: object, field: str) -> list[str] | list[ScriptTest]:
    """Reads a record's tests: Python statements, or mappings of 'input' and 'output'.

    Args:
      value: content of the record's field.
      field: name of the field, for the message.

    Raises:
      ValueError: the field holds no tests.
    """
    tests: Any = value
    if isinstance(value, str):
        try:
            tests = json.loads(value)
        except json.JSONDecodeError:
            tests = [value]
    if isinstance(tests, Mapping) and {"inputs", "outputs"} <= tests.keys():
        pairs = zip(tests["inputs"], tests["outputs"], strict=True)
        tests = [{"input": stdin, "output": wanted} for stdin, wanted in pairs]
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
