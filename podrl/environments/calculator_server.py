"""The calculator as an MCP server: `python -m podrl.environments.calculator_server`, over stdio, sse or http."""

from podrl.environments import tool_server
from podrl.environments.calculator import calculator

if __name__ == "__main__":
    tool_server.start(lambda: calculator)
