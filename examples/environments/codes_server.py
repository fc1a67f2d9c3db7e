"""An MCP server with one tool, on standard input and output: ``python codes_server.py codes.json``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from mcp.server.fastmcp import FastMCP

server = FastMCP("codes", log_level="WARNING")
CODES = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))


@server.tool()
def look_up(name: str) -> str:
    """Find the code of a name."""
    return str(CODES.get(name, "unknown name"))


if __name__ == "__main__":
    server.run()
