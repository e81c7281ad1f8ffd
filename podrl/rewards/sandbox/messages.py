"""The messages between the job, the checker and a program's process, as JSON holds them."""

from typing import NotRequired, TypedDict


class ProgramLimits(TypedDict):
    """The limits of every sandbox.

    Attributes:
      memory_mb: address space of a process, in MiB.
      cpu_s: seconds of CPU time of a program.
      wall_s: seconds of time for all tests of a program.
      threads: processes and threads of a program.
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
    """What a sandbox may take and see.

    Attributes:
      imports: directories that programs import from.
      paths: files and directories that a sandbox shows.
    """

    imports: list[str]
    paths: list[str]


class Printed(TypedDict):
    """A test of a script: the text it reads, and the text it must print."""

    input: str
    output: str


class Testing(TypedDict):
    """A program and its tests.

    Attributes:
      program: source of the program.
      tests: statements in Python, or what a script must print.
      setup: statements before the first test.
      all: True runs all tests; False ends at the first that fails.
    """

    program: str
    tests: list[str] | list[Printed]
    setup: str
    all: bool


class Verdict(TypedDict):
    """The outcome of a program's tests.

    Attributes:
      passed: a truth value for every test that ran.
      said: why the first test failed; '' where none did.
      unusable: a value that a test gave the program and that is not plain data; '' for none.
      error: why no program can pass the tests.
      refused: why this host isolates no program.
    """

    passed: list[bool]
    said: str
    unusable: NotRequired[str]
    error: NotRequired[str]
    refused: NotRequired[str]
