"""The calculator as an MCP server: `python -m podrl.environments.calculator_server`, over stdio, sse or http."""

from typing import Any

from absl import app, flags, logging

from podrl.environments.calculator import calculator


def serve(transport: str, **address: Any) -> None:
    """Answers calls until the client has gone (stdio), or for ever (sse, streamable-http).

    Args:
      transport: 'stdio', 'sse' or 'streamable-http'.
      address: `host` and `port` for 'sse' and 'streamable-http'; none for 'stdio'.
    """
    from mcp.types import CallToolResult

    def ask(query: str) -> CallToolResult:
        try:
            text, failed = calculator(query), False
        except ValueError as error:
            # Not raised: package mcp would word the error differently from a Python tool.
            text, failed = f"ValueError: {error}", True
        return CallToolResult.model_validate({"content": [{"type": "text", "text": text}], "isError": failed})

    made: Any
    try:
        from mcp.server.mcpserver import MCPServer
    except ImportError:  # package mcp 1.x, in which the address is a setting of the server
        from mcp.server.fastmcp import FastMCP  # pyright: ignore[reportAttributeAccessIssue]

        made, address = FastMCP("calculator", **address), {}
    else:
        made = MCPServer("calculator")
    made.tool(name="calculator", description=calculator.__doc__)(ask)
    made.run(transport, **address)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments {argv[1:]}: the flags are --transport and --port.")
    logging.set_verbosity(logging.WARNING)  # package mcp 1.x logs every request
    address = {} if _TRANSPORT.value == "stdio" else {"host": "127.0.0.1", "port": _PORT.value}
    serve(_TRANSPORT.value, **address)


if __name__ == "__main__":
    _TRANSPORT = flags.DEFINE_enum("transport", "stdio", ("stdio", "sse", "streamable-http"), "How it is asked.")
    _PORT = flags.DEFINE_integer("port", 8000, "Port on this machine; not of stdio.")
    app.run(main)
