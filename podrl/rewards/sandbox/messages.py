"""Messages between the job, the checker and a program's process, in their JSON form."""

from typing import NotRequired, TypedDict


class ProgramLimits(TypedDict):
    """The limits of every sandbox.

    Attributes:
      memory_mb: largest address space of a process, in MiB; the process that runs the tests has additional room for the
        text of the program and its tests.
      cpu_s: longest CPU time of one run of a program, in seconds; a script runs once per test.
      wall_s: longest time of all tests of a program together, in seconds by the clock.
      threads: largest number of threads of a program besides its first thread.
      file_mb: longest file, and longest printed text, in MiB.
      disk_mb: size of the temporary file system, in MiB.
    """

    memory_mb: int
    cpu_s: int
    wall_s: float
    threads: int
    file_mb: int
    disk_mb: int


class Bounds(ProgramLimits):
    """The limits of every sandbox, and the files that it sees.

    Attributes:
      imports: directories that programs import from.
      paths: files and directories of the host that a sandbox sees.
    """

    imports: list[str]
    paths: list[str]


class ScriptTest(TypedDict):
    """A test of a script: the text it reads, and the text it must print."""

    input: str
    output: str


class ProgramTests(TypedDict):
    """A program and its tests.

    Attributes:
      program: source of the program.
      tests: statements in Python that raise on failure, or texts that a script reads and must print.
      setup: statements in Python that run before the first test.
      all: True runs all tests; False stops at the first test that fails.
    """

    program: str
    tests: list[str] | list[ScriptTest]
    setup: str
    all: bool


class Verdict(TypedDict):
    """The outcome of a program's tests.

    Attributes:
      passed: True or False for every test that ran; False for every test if the program or the set-up fails, or if the
        program forges a message; empty if the sandbox ended without an answer, or with `error` or `refused`.
      said: reason why the first of the failed tests failed, or why the sandbox gave no answer; '' for neither.
      unusable: complaint about a value that a test gave the program and that is not plain data; '' for none.
      error: reason why no program can pass the tests; absent if there is none.
      refused: reason why this host cannot isolate a program; absent if the host can.
    """

    passed: list[bool]
    said: str
    unusable: NotRequired[str]
    error: NotRequired[str]
    refused: NotRequired[str]
