"""Offers a Python function as a tool over MCP; each server that comes with podrl consists of a function and this
file."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from absl import app, flags, logging


def serve(tool: Callable[..., str], transport: str, **address: str | int) -> None:
    """Answers calls until the client has gone (stdio), or for ever (sse, streamable-http).

    Args:
      tool: the tool; clients see its name, annotations and docstring. If it raises a ValueError, the call has failed,
        and the model reads the text of the error.
      transport: 'stdio', 'sse' or 'streamable-http'.
      address: `host` and `port` for 'sse' and 'streamable-http'; nothing for 'stdio'.
    """
    from mcp.types import CallToolResult

    name, signature = tool.__name__, inspect.signature(tool)

    @functools.wraps(tool)
    def call(*args: object, **kwargs: object) -> CallToolResult:
        try:
            text, failed = tool(*args, **kwargs), False
        except ValueError as error:
            # If the error were raised here, package mcp would word it differently from the error of a Python tool.
            text, failed = f"ValueError: {error}", True
        return CallToolResult.model_validate({"content": [{"type": "text", "text": text}], "isError": failed})

    call.__signature__ = signature.replace(return_annotation=CallToolResult)  # pyright: ignore[reportAttributeAccessIssue]
    call.__annotations__ = {**tool.__annotations__, "return": CallToolResult}
    mcp_server: Any
    try:
        from mcp.server.mcpserver import MCPServer
    except ImportError:  # package mcp 1.x, in which the address is a setting of the server
        from mcp.server.fastmcp import FastMCP  # pyright: ignore[reportAttributeAccessIssue]

        mcp_server, address = FastMCP(name, **address), {}
    else:
        mcp_server = MCPServer(name)
    mcp_server.tool(name=name, description=tool.__doc__)(call)
    mcp_server.run(transport, **address)


def start(make: Callable[[], Callable[..., str]]) -> None:
    """Reads the flags --transport and --port and the program's own flags, and serves a tool.

    Args:
      make: function that makes the tool after the flags have been read.
    """
    transport = flags.DEFINE_enum(
        "transport", "stdio", ("stdio", "sse", "streamable-http"), "Transport between clients and server."
    )
    port = flags.DEFINE_integer("port", 8000, "Port to listen at on this machine; unused with stdio.")

    def main(argv: list[str]) -> None:
        if len(argv) > 1:
            raise app.UsageError(f"Unknown arguments {argv[1:]}: give flags alone, such as --transport and --port.")
        logging.set_verbosity(logging.WARNING)  # package mcp 1.x logs every request
        address = {} if transport.value == "stdio" else {"host": "127.0.0.1", "port": port.value}
        serve(make(), transport.value, **address)

    app.run(main)
