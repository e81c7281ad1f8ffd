"""Settings of environments and tools: which ones a job has, their limits, and the format of tool calls."""

import dataclasses
import importlib.util
import os
import pathlib
import shlex
import shutil
import string
import sys
from collections.abc import Mapping
from typing import Any, Literal

from podrl.config import Count, Finite, Natural, Positive, Share, Workers, install, nearest, section
from podrl.environments import dr_tulu
from podrl.storage.regular import regular
from podrl.workers.user_code import Limits

TOOLS, NONE, PROGRAM = "tools", "none", "program"  # names of the environments that come with podrl
BUILT_IN_TOOLS = {"calculator": "podrl.environments.calculator"}  # modules of functions, by the names of both
VERIFIERS_AGENT = pathlib.Path(__file__).with_name("verifiers_agent.py")
Parser = Literal["call_tool", "tool", "legacy", "hermes", "json", "v20250824", "unified", "qwen3", "llama3", "gemma"]

History = Literal["template", "append"]


def is_own(name: str) -> bool:
    """Returns True if an environment's name refers to code of the user: 'file.py:Name' or 'package.module:Name'."""
    return ":" in name


@section("env.mcp")
@dataclasses.dataclass(frozen=True)
class MCPServer:
    """A server that offers tools over MCP, and how the names that the model uses map to the server's tools.

    Attributes:
      target: command that starts the server (stdio), or its address: 'http://host:port/mcp' (streamable http) or
        'http://host:port/sse' (sse). `python` as the first word of a command is the interpreter that runs podrl.
      names: tools that the model may call, by the names that the model uses; empty for all tools of the server, or, if
        env.tools names tools of DR-Tulu, for those of them that the server has.
      aliases: the server's name for a tool, by the name that the model uses; needed only if the two names differ.
      query: argument that receives the text between the tags of a call, by the name of the tool. For a tool without an
        entry, the names query, url, webpage_url, input and text are tried in this order, then the first required
        argument, then the first argument.
      result: tag around each document of a tool's answer, by the name of the tool: 'snippet' or 'webpage'. A tool
        without an entry has the tag of DR-Tulu's tool of the same name, else no tag: its answer is one text.
      deadline_s: longest time of one call, seconds.
      retries: number of times that a call is repeated after the connection was lost during the call.
      concurrency: largest number of calls at the same time.
      environment: names of environment variables that the server's command sees although their names sound secret,
        such as 'SERPER_API_KEY'; all other variables of this kind are withheld, and listed when the server starts.
      headers: text of each http header, by the name of the header. '$NAME' stands for the value of an environment
        variable of the job, as in 'Bearer $SEARCH_TOKEN'. Each text must name at least one variable: secrets do not
        belong in configurations.
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
            raise ValueError(
                f"env.mcp.target={self.target!r} is not a valid command: {error}. Close its quotes."
            ) from None
        if not words:
            raise ValueError("env.mcp.target is empty: give a command, http://HOST:PORT/mcp or http://HOST:PORT/sse.")
        if "://" in words[0] and not self.is_url:
            raise ValueError(
                f"env.mcp.target={self.target!r} is no command, and the address of a server begins with http:// or "
                "https://."
            )
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
        Limits(environment=self._variables())  # raises an error if a variable holds the job's own secret

    @property
    def is_url(self) -> bool:
        """True if the server is reached over the network and not started by a command."""
        return self.target.startswith(("http://", "https://"))

    @property
    def command(self) -> list[str]:
        """The words of the command that starts the server; empty if `target` is an address."""
        words = [] if self.is_url else shlex.split(self.target)
        return [sys.executable, *words[1:]] if words[:1] == ["python"] else words

    def check_command(self) -> None:
        """Raises ValueError if this machine lacks package mcp, the command, or its Python file."""
        if importlib.util.find_spec("mcp") is None:
            raise ValueError(f"env.mcp: {self.target} needs package mcp: {install('tools')}.")
        if self.command and shutil.which(self.command[0]) is None:
            script = self.command[0].endswith(".py")
            hint = f" If it is a Python file, name it as 'python {self.target}'." if script else ""
            raise ValueError(
                f"env.mcp: {self.target} cannot be started: there is no command {self.command[0]!r}.{hint}"
            )
        file = pathlib.Path(self.command[1]) if self.command[:1] == [sys.executable] and self.command[1:] else None
        if file is not None and file.suffix == ".py" and not file.is_file():
            raise ValueError(f"env.mcp: {self.target} cannot be started: there is no file {file.absolute()}.")

    def _variables(self) -> tuple[str, ...]:
        named = [name for text in self.headers.values() for name in string.Template(text).get_identifiers()]
        return (*self.environment, *named)

    def secrets(self) -> tuple[dict[str, str], dict[str, str]]:
        """Looks up the server's secrets in the environment of this process.

        Returns:
          (variables by name, headers by name), with their values.

        Raises:
          ValueError: a variable is not set. The message contains no values.
        """
        if missing := [name for name in self._variables() if name not in os.environ]:
            raise ValueError(
                f"env.mcp: {self.target} needs the environment variables {', '.join(missing)}, which are not set in "
                "this process. Set them on every host that generates, or leave them out of environment and headers."
            )
        texts = {header: string.Template(text).substitute(os.environ) for header, text in self.headers.items()}
        return {name: os.environ[name] for name in self.environment}, {k: text.strip() for k, text in texts.items()}


@section("env")
@dataclasses.dataclass(frozen=True)
class EnvironmentConfig:
    """The environment of a job's samples, its tools and its limits.

    Attributes:
      environment: environment of the samples: 'tools' for the tools of `tools` and `mcp`; 'file.py:Name' or
        'package.module:Name' for a class (instantiated once per episode) or an object with an
        `async def run(task, model)`. '' means the agent program if `program` or `verifiers` is set, the tools if
        `tools` or `mcp` is set, and otherwise no environment.
      others: further environments, named as in `environment`, or 'none' for one answer without tools. If the field
        `env` of a record names one of them, this environment plays the record. data.sources can set the field for all
        records of a source.
      program: command of an agent program, such as 'python agent.py', which calls the model over HTTP; '' for none. See
        docs/agents.md. `python` as the first word is the interpreter that runs podrl.
      verifiers: interpreter of a Python environment with the package verifiers, such as 'vf/bin/python'. It plays the
        tasks that podrl.verifiers wrote, in place of a program; '' for none. See docs/ecosystems.md.
      processes: number of processes of the program in each worker. A process runs one episode at a time; other episodes
        wait for a free process. With a max_staleness of 2 or more, an episode may pause until the next window
        (docs/async.md). The paused episode keeps its process, but this process does not count here.
      failed_share: largest share of samples that may be lost because their programs fail; more failures end the job.
        Each host counts by itself, over its part of a batch or of an evaluation; with rollout.clock='wall' over the
        samples of one training prompt.
      history: 'template' opens a branch (a new token sequence of the sample) where the chat template renders earlier
        turns differently from how they were sampled; templates that drop thoughts do this. The model then reads the
        same tokens that it will read when deployed. 'append' continues the sampled tokens instead.
      tools: Python tools: 'file.py:function', 'package.module:function' or the name of a built-in tool. The name of a
        tool of DR-Tulu, such as 'google_search', stands for the tool of a server in `mcp`.
      mcp: servers that offer tools, each an MCPServer or only its target.
      parser: format in which the model writes a tool call. 'call_tool' (also 'v20250824'), 'tool' (also 'unified') and
        'legacy' are DR-Tulu's formats. 'hermes' (also 'qwen3') is JSON in <tool_call> tags; 'json' (also 'llama3',
        'gemma') is JSON without tags. For 'hermes' and 'json', the model's chat template lists the tools and their
        schemas in the prompt.
      max_tool_calls: largest number of calls that are run for one sample. The next call gets the answer
        'Max tool calls exceeded.', and all later calls are taken for ordinary text.
      max_calls_per_tool: largest number of calls of a tool that are run for one sample, by the name of the tool;
        further calls of that tool fail. A tool without an entry is limited by max_tool_calls alone.
      arguments: arguments that are added to a call if the model leaves them out, by the names of tool and argument.
      max_turns: largest number of turns of the model in one episode.
      calls_per_window: largest number of turns that a sample may end in each of its windows except the last; used with
        a max_staleness of 2 or more. A window is the time under one version of the weights (docs/async.md). The
        environment's answer to the last of these turns enters the sample in the next window, so that slow tools run
        while the trainer updates. None sets no limit: a window then waits for all answers.
      output_tokens: largest number of tokens of one tool's output. The middle of a longer output is left out, and a
        note in its place says how much is left out.
      deadline_s: longest time that the environment and its tools may take in one episode, seconds; time of waiting for
        the model does not count. A sample that takes longer is left out of the loss.
      call_deadline_s: longest time of one call of a Python tool, seconds.
      blocked_s: longest time for which an environment's code may block its process, seconds. The other episodes of the
        process wait in the meantime.
      retries: number of times that a call of a Python tool is repeated after the tool's process died.
      concurrency: largest number of calls of one Python tool at the same time, on each host.
      server_deadline_s: longest time for which an MCP server may be unreachable, seconds. After a longer time the job
        ends with exit code 42, so that it can be started again.
      workers: number of processes in which environments run, on each host.
      reward_weight: factor of the environment's rewards. The products are added to the reward functions' rewards.
      system_prompt_file: file with the system prompt: plain text, or YAML with the key system_prompt; '' for none.
    """

    environment: str = ""
    others: tuple[str, ...] = ()
    program: str = ""
    verifiers: str = ""
    processes: Count = 16
    failed_share: Share = 0.2
    history: History = "template"
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
        for name, options in self.arguments.items():
            if not isinstance(options, Mapping):
                raise ValueError(f"env.arguments: {name!r} has {options!r}, and must map argument names to values.")
        if TOOLS in (self.environment, *self.others) and not self.tools and not self.mcp:
            raise ValueError("environment 'tools' has no tools: name some in env.tools or servers in env.mcp.")
        if twice := [tool for i, tool in enumerate(self.tools) if tool in self.tools[:i]]:
            raise ValueError(f"env.tools={self.tools} names {twice[0]!r} twice: name each tool once.")
        known = (*BUILT_IN_TOOLS, *dr_tulu.TOOLS)
        for tool in self.tools:
            place, _, name = tool.rpartition(":")
            if tool not in known and not (place and name):
                raise ValueError(
                    f"env.tools: {tool!r} is not a built-in tool, 'file.py:function' or 'package.module:function'."
                    f"{nearest(tool, known)}"
                )
        self._check_program()
        if self.environment not in ("", TOOLS, PROGRAM) and not is_own(self.environment):
            raise ValueError(
                f"env.environment={self.environment!r} must be '' (none), 'tools', 'file.py:Name' or "
                "'package.module:Name'."
            )
        for other in self.others:
            if other not in (TOOLS, NONE) and not is_own(other):
                raise ValueError(
                    f"env.others: {other!r} must be 'none', 'tools', 'file.py:Name' or 'package.module:Name'."
                )
        if self.others and not self.used:
            raise ValueError(
                f"env.others={self.others} needs env.environment, which plays the records without the field `env`: "
                "name an environment, or tools."
            )

    def _check_program(self) -> None:
        if self.program and self.verifiers:
            raise ValueError(
                f"env.verifiers={self.verifiers!r} beside env.program={self.program!r}: set env.program='' to play "
                "tasks of verifiers."
            )
        if self.environment == PROGRAM and not self.agent:
            raise ValueError("env.environment='program' names no program: give its command as env.program.")
        if not self.agent:
            return
        key = f"env.program={self.program!r}" if self.program else f"env.verifiers={self.verifiers!r}"
        if self.environment not in ("", PROGRAM) or self.tools or self.mcp:
            raise ValueError(
                f"{key} beside env.environment={self.environment!r}, env.tools={self.tools} and env.mcp: a program "
                "brings its own tools, so leave the others out."
            )
        try:
            words = self.command
        except ValueError as error:
            raise ValueError(f"{key} is not a valid command: {error}. Close its quotes.") from None
        if not words:
            raise ValueError(f"{key} is empty: give a command, such as 'python agent.py'.")

    @property
    def agent(self) -> str:
        """The setting that names the agent program: its command, or the interpreter of verifiers; '' for none."""
        return self.program or self.verifiers

    @property
    def command(self) -> list[str]:
        """The words of the agent program's command; none without a program."""
        if self.verifiers:
            # Without -P, Python would search the file's directory for imports and find podrl's modules there.
            return [self.verifiers, "-P", str(VERIFIERS_AGENT)]
        return shlex.split(self.program)

    @property
    def used(self) -> bool:
        """True if the job's samples have an environment."""
        return bool(self.environment or self.agent or self.tools or self.mcp)

    @property
    def branches(self) -> bool:
        """True if an environment of the job may call Model.chat, so that its samples may have several pieces."""
        return any(choice not in (TOOLS, NONE) for choice in self.choices)

    @property
    def choices(self) -> tuple[str, ...]:
        """Names of the job's environments; the first is used for records without the field `env`."""
        return (self.environment or (PROGRAM if self.agent else TOOLS), *self.others) if self.used else ()

    def system_prompt(self) -> str:
        """Reads the text of `system_prompt_file`.

        Raises:
          ValueError: the file cannot be read, or is YAML without the key system_prompt.
        """
        path = pathlib.Path(self.system_prompt_file)
        try:
            text = regular(path).read_text()
            if path.suffix in (".yaml", ".yml"):
                import yaml  # installed with podrl[tools]

                text = yaml.safe_load(text)["system_prompt"]
        except (OSError, ImportError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"env.system_prompt_file={self.system_prompt_file!r} cannot be read ({type(error).__name__}: {error}): "
                "give a file of plain text, or YAML (with the package pyyaml) with the key system_prompt."
            ) from error
        return str(text)

    @property
    def servers(self) -> tuple[MCPServer, ...]:
        """The servers of `mcp`; an entry that is only a target becomes an MCPServer."""
        return tuple(MCPServer(one) if isinstance(one, str) else one for one in self.mcp)
