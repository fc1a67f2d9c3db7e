"""A coding agent with one tool and no dependencies. It speaks Anthropic's protocol and runs inside the sandbox.

ANTHROPIC_BASE_URL=http://host:port ANTHROPIC_AUTH_TOKEN=... python3 mini_agent.py "what to do"
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any

REQUEST_TIMEOUT_S = 600.0
TEXT = {"type": "string"}
TOOL = {
    "name": "write",
    "description": "Write a file of the working directory.",
    "input_schema": {"type": "object", "properties": {"path": TEXT, "text": TEXT}, "required": ["path", "text"]},
}


def main() -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": sys.argv[1]}]
    while True:
        blocks = ask(messages)
        uses = [block for block in blocks if block["type"] == "tool_use"]
        if not uses:
            return
        results = [{"type": "tool_result", "tool_use_id": use["id"], "content": write(use["input"])} for use in uses]
        messages += [{"role": "assistant", "content": blocks}, {"role": "user", "content": results}]


def ask(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    body = {"model": "any", "max_tokens": 4096, "messages": messages, "tools": [TOOL]}
    request = urllib.request.Request(
        f"{os.environ['ANTHROPIC_BASE_URL']}/v1/messages",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['ANTHROPIC_AUTH_TOKEN']}"},
    )
    # An empty handler: a proxy of the environment cannot reach the adapter.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=REQUEST_TIMEOUT_S) as reply:
        blocks: list[dict[str, Any]] = json.load(reply)["content"]
        return blocks


def write(given: dict[str, Any]) -> str:
    path = Path(str(given.get("path", ""))).resolve()
    if not path.is_relative_to(Path.cwd()) or path == Path.cwd():
        # The model chooses the path. It gets the error as the tool's result and may try again.
        return "error: not a file of the working directory"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(given.get("text", "")) + "\n")
    except OSError as error:
        return f"error: {error.strerror}"
    return "saved"


if __name__ == "__main__":
    main()
