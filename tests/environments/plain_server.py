"""An MCP server written without any package: `plain_server.py PAGES`; its tools are `tool0`, ..., one per page."""

import json
import os
import sys


def answer(method, params, pages):
    """Returns the result of a request, for servers on any transport."""
    match method:
        case "initialize":
            about = {"name": "plain", "version": "1"}
            return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": about}
        case "tools/list":
            page = int(params.get("cursor", 0))
            schema = {"type": "object", "properties": {"query": {"type": "string"}, "n": {"type": "integer"}}}
            tools = [{"name": f"tool{page}", "inputSchema": {**schema, "required": ["query", "n"]}}]
            return {"tools": tools} | ({"nextCursor": str((page + 1) % 9)} if page + 1 < pages else {})
        case "tools/call":
            given = params["arguments"]
            text = f"{sys.executable} {os.environ.get(given['query'])} {given.get('n')}"
            return {"content": [{"type": "text", "text": text}]}
        case "ping":
            return {}
    return None


if __name__ == "__main__":
    sys.stderr.write(f"the key is {os.environ.get('PLAIN_API_KEY')}\n")
    for line in sys.stdin:
        asked = json.loads(line)
        if (result := answer(asked["method"], asked.get("params") or {}, int(sys.argv[1]))) is not None:
            sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}) + "\n")
            sys.stdout.flush()
