"""Settings of environments and tools: what a sample may do, for how long, and how it asks."""

import dataclasses
import os
import pathlib
import shlex
import string
from collections.abc import Mapping
from typing import Any, Literal

from podrl.config import Count, Finite, Natural, Positive, Share, Workers, section
from podrl.storage.regular import regular
from podrl.workers.user_code import Limits

TOOLS, NONE, PROGRAM = "tools", "none", "program"  # environments by name
Parser = Literal["call_tool", "tool", "legacy", "hermes", "json", "v20250824", "unified", "qwen3", "llama3", "gemma"]


@section("env.mcp")
@dataclasses.dataclass(frozen=True)
class MCPServer:
    """A server that offers tools over MCP, and how the model's words map to its tools.

    Attributes:
      target: a command (stdio), 'http://host:port/mcp' (streamable http), or 'http://host:port/sse' (sse). `python` at
        the head of a command is the interpreter that runs podrl.
      names: the tools that the model may call, in the model's words; empty for all that the server has.
      aliases: the model's word to the server's, for tools that are called otherwise there.
      query: the model's word to the argument that the text between the tags is; 'query' for others.
      result: the model's word to the tag around each document, 'snippet' or 'webpage'; 'snippet' for others.
      deadline_s: seconds that one call may take.
      retries: calls made again after the connection was lost in the middle.
      concurrency: calls at once.
      environment: names of environment variables of the job that a command sees though their names sound secret, such
        as 'SERPER_API_KEY'; all others of this kind are withheld, and listed at the start.
      headers: text of each http header by its name; '$NAME' in it is the value of an environment variable of the job,
        as in 'Bearer $SEARCH_TOKEN'. At least one must be named: secrets are not for configurations.
    """

    target: str
    names: tuple[str, ...] = ()
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    query: Mapping[str, str] = dataclasses.field(default_factory=dict)
    result: Mapping[str, str] = dataclasses.field(default_factory=dict)
    deadline_s: Positive = 180.0
    retries: Natural = 3
    concurrency: Count = 20
    environment: tuple[str, ...] = ()
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            words = shlex.split(self.target)
        except ValueError as error:
            raise ValueError(f"env.mcp.target={self.target!r} is no command: {error}. Close its quotes.") from None
        if not words:
            raise ValueError("env.mcp.target is empty: give a command, http://HOST:PORT/mcp or http://HOST:PORT/sse.")
        if self.is_url and self.environment:
            raise ValueError(f"env.mcp.environment is for commands, and {self.target} is an address: use headers.")
        if not self.is_url and self.headers:
            raise ValueError(f"env.mcp.headers are for addresses, and {words[0]!r} is a command: use environment.")
        for header, text in self.headers.items():
            template = string.Template(text)
            if not template.is_valid() or not template.get_identifiers():
                raise ValueError(
                    f"env.mcp.headers: {header!r} names no environment variable. Write its value as $NAME, such as "
                    "'Bearer $SEARCH_TOKEN', and set the variable where the job runs."
                )
        Limits(environment=self._variables())  # refuses the secrets of the job itself

    @property
    def is_url(self) -> bool:
        """True where the server is asked over the network."""
        return self.target.startswith(("http://", "https://"))

    def _variables(self) -> tuple[str, ...]:
        named = [name for text in self.headers.values() for name in string.Template(text).get_identifiers()]
        return (*self.environment, *named)

    def secrets(self) -> tuple[dict[str, str], dict[str, str]]:
        """(Variables, headers) of the server, with values from this process's environment.

        Raises:
          ValueError: a variable is not set; the message has no values.
        """
        if missing := [name for name in self._variables() if name not in os.environ]:
            raise ValueError(
                f"env.mcp: {self.target} is to be given {', '.join(missing)}, which this process's environment does "
                "not have. Set it on every host that generates, or leave it out of environment and headers."
            )
        texts = {header: string.Template(text).substitute(os.environ) for header, text in self.headers.items()}
        return {name: os.environ[name] for name in self.environment}, {k: text.strip() for k, text in texts.items()}


@section("env")
@dataclasses.dataclass(frozen=True)
class EnvironmentConfig:
    """The environment of a job's samples, its tools and its limits.

    Attributes:
      environment: '' for none; 'tools' for the tools below; 'file.py:Name' or 'package.module:Name' for a class (made
        once per episode), or an object, with an `async def run(task, model)`.
      others: environments beside it, as named above, and 'none' for one answer without tools. A record whose field
        `env` names one of them has it instead; data.sources gives that field to all records of a source.
      program: command of an agent program, such as 'python agent.py', which asks the model over HTTP; '' for none. See
        docs/agents.md. `python` at its head is the interpreter that runs podrl.
      processes: processes of `program` in each worker; one runs one episode at a time, and further episodes wait.
      failed_share: share of the samples of a batch whose programs may fail; more end the job.
      tools: Python tools: 'file.py:function', 'package.module:function' or the name of a built-in one.
      mcp: servers that offer tools, each as an MCPServer or only its target.
      parser: how the model writes a call. 'call_tool' (also 'v20250824'), 'tool' (also 'unified') and 'legacy' are
        DR-Tulu's. 'hermes' (also 'qwen3') is JSON in <tool_call> tags, 'json' (also 'llama3', 'gemma') a turn that is
        one JSON object: with these, prompts of the model's chat template name the tools and their schemas.
      max_tool_calls: calls of one sample that are run; the next one gets 'Max tool calls exceeded.'.
      max_calls_per_tool: calls of one sample that are run, by the name of the tool, for tools that may be called less
        often; the next one of that tool is a failed call.
      arguments: arguments that a tool is given where the model gives none, by the names of tool and argument.
      max_turns: turns of the model in one episode.
      calls_per_window: with max_staleness of 2 or more, turns that a sample may end in a window before its last; what
        its environment then says is heard in the next window, so that slow tools run beside updates. None for any
        number: a window then waits for its answers.
      output_tokens: tokens of one tool's output; what is longer is cut in the middle, and says so.
      deadline_s: seconds that the environment and its tools may take in one episode; waiting for the model is not
        counted. The sample then leaves the loss.
      call_deadline_s: seconds that one call of a Python tool may take.
      blocked_s: seconds that an environment's code may hold its process, in which other episodes wait.
      retries: calls of a Python tool made again after its process died.
      concurrency: calls of one Python tool at once, on each host.
      server_deadline_s: seconds that an MCP server may be away before the job ends, to be started again (code 42).
      workers: processes in which environments run, on each host.
      reward_weight: what the rewards of the environment are multiplied by, beside those of reward functions.
      system_prompt_file: file of the system prompt: plain text, or YAML with the key system_prompt; '' for none.
    """

    environment: str = ""
    others: tuple[str, ...] = ()
    program: str = ""
    processes: Count = 16
    failed_share: Share = 0.2
    tools: tuple[str, ...] = ()
    mcp: tuple[MCPServer | str, ...] = ()
    parser: Parser = "call_tool"
    max_tool_calls: Natural = 10
    max_calls_per_tool: Mapping[str, int] = dataclasses.field(default_factory=dict)
    arguments: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    max_turns: Count = 100
    calls_per_window: Count | None = None
    output_tokens: Count = 1024
    deadline_s: Positive = 600.0
    call_deadline_s: Positive = 30.0
    blocked_s: Positive = 10.0
    retries: Natural = 0
    concurrency: Count = 16
    server_deadline_s: Positive = 60.0
    workers: Workers = 1
    reward_weight: Finite = 1.0
    system_prompt_file: str = ""

    def __post_init__(self) -> None:
        for name, most in self.max_calls_per_tool.items():
            if not isinstance(most, int) or isinstance(most, bool) or most < 0:
                raise ValueError(f"env.max_calls_per_tool: {name!r} has {most!r}, and must have a number of calls.")
        for name, given in self.arguments.items():
            if not isinstance(given, Mapping):
                raise ValueError(f"env.arguments: {name!r} has {given!r}, and must have values by argument's names.")
        if TOOLS in (self.environment, *self.others) and not self.tools and not self.mcp:
            raise ValueError("environment 'tools' has no tools: name some in env.tools or servers in env.mcp.")
        self._check_program()
        if self.environment not in ("", TOOLS, PROGRAM) and ":" not in self.environment:
            raise ValueError(
                f"env.environment={self.environment!r} must be '' (none), 'tools', 'file.py:Name' or "
                "'package.module:Name'."
            )
        for other in self.others:
            if other not in (TOOLS, NONE) and ":" not in other:
                raise ValueError(
                    f"env.others: {other!r} must be 'none', 'tools', 'file.py:Name' or 'package.module:Name'."
                )
        if self.others and not self.used:
            raise ValueError(
                f"env.others={self.others} but env.environment is '', which records without the field `env` have: name "
                "one, or tools."
            )

    def _check_program(self) -> None:
        if self.environment == PROGRAM and not self.program:
            raise ValueError("env.environment='program' names no program: give its command as env.program.")
        if not self.program:
            return
        if self.environment not in ("", PROGRAM) or self.tools or self.mcp:
            raise ValueError(
                f"env.program={self.program!r} beside env.environment={self.environment!r}, env.tools={self.tools} and "
                "env.mcp: a program brings its own tools, so leave the others out."
            )
        try:
            words = shlex.split(self.program)
        except ValueError as error:
            raise ValueError(f"env.program={self.program!r} is no command: {error}. Close its quotes.") from None
        if not words:
            raise ValueError(f"env.program={self.program!r} is empty: give a command, such as 'python agent.py'.")

    @property
    def used(self) -> bool:
        """True where samples have an environment."""
        return bool(self.environment or self.program or self.tools or self.mcp)

    @property
    def choices(self) -> tuple[str, ...]:
        """Names of the environments that records can have, that of records without the field `env` first."""
        return (self.environment or (PROGRAM if self.program else TOOLS), *self.others) if self.used else ()

    def system_prompt(self) -> str:
        """The text of `system_prompt_file`.

        Raises:
          ValueError: it cannot be read, or holds none.
        """
        path = pathlib.Path(self.system_prompt_file)
        try:
            text = regular(path).read_text()
            if path.suffix in (".yaml", ".yml"):
                import yaml  # comes with podrl[tools]

                text = yaml.safe_load(text)["system_prompt"]
        except (OSError, ImportError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"env.system_prompt_file={self.system_prompt_file!r} cannot be read ({type(error).__name__}: {error}): "
                "give a file of plain text, or YAML (with the package pyyaml) with the key system_prompt."
            ) from error
        return str(text)

    @property
    def servers(self) -> tuple[MCPServer, ...]:
        """`mcp` with targets made servers."""
        return tuple(MCPServer(one) if isinstance(one, str) else one for one in self.mcp)
