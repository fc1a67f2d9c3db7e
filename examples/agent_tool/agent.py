"""An agent that does not depend on slime: OpenAI chat completions over HTTP, and one tool.

    OPENAI_BASE_URL=http://host:port/v1 OPENAI_API_KEY=... python agent.py facts.json "code of amber?"

Prints its answer. Any program that can be pointed at another server can take its place.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import httpx

MAX_TURNS = 3
REQUEST_TIMEOUT_S = 60.0
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "The code of a name.",
        "parameters": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
}


def main() -> None:
    facts = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    messages: list[dict[str, Any]] = [{"role": "user", "content": sys.argv[2]}]
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    base_url = os.environ["OPENAI_BASE_URL"]
    # trust_env=False: a proxy of the environment would get the requests for a local server.
    with httpx.Client(headers=headers, timeout=REQUEST_TIMEOUT_S, trust_env=False, verify=False) as client:
        for _ in range(MAX_TURNS):
            body = {"model": "any", "messages": messages, "tools": [TOOL]}
            reply = client.post(f"{base_url}/chat/completions", json=body)
            reply.raise_for_status()
            message = reply.json()["choices"][0]["message"]
            calls = message.get("tool_calls") or []
            if not calls:
                print(message["content"])
                return
            # The whole history goes back with every request, as OpenAI's protocol has no state.
            messages.append(message)
            for call in calls:
                # The model writes the arguments: the name may be missing or unknown.
                name = json.loads(call["function"]["arguments"]).get("name", "")
                found = facts.get(str(name).strip(), "nothing")
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": found})


if __name__ == "__main__":
    main()
