"""The engine's share of the command line: every ``--sglang-*`` flag of the installed server."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Sequence
from typing import Any

from slime.backends.sglang_utils.server_args import known_flags
from slime.config.parse import EngineNamespace

__all__ = ["read_engine"]

_PREFIXES = ("--sglang-", "--no-sglang-")


def read_engine(tokens: Sequence[str], own: Collection[str]) -> EngineNamespace:
    """Take SGLang's own flags, prefix removed, out of ``tokens``; those in ``own`` are declared by slime and stay."""
    rest: list[str] = []
    engine: list[str] = []
    target = rest
    for token in tokens:
        if token.startswith("--"):
            is_engine = token.startswith(_PREFIXES) and token.split("=")[0] not in own
            target = engine if is_engine else rest
            if is_engine:
                token = token.replace("sglang-", "", 1)
        target.append(token)
    if not engine:
        return EngineNamespace(rest)
    attributes = _attributes(engine)
    problems = _unknown_flags(engine, known_flags())
    return EngineNamespace(rest, attributes, frozenset(attributes), engine, problems=problems)


def _unknown_flags(engine: Sequence[str], known: Collection[str]) -> list[str]:
    problems = []
    for token in engine:
        flag = token.split("=")[0]
        if not flag.startswith("--") or flag in known or (flag.startswith("--no-") and "--" + flag[5:] in known):
            continue
        near = difflib.get_close_matches(flag, known, n=1, cutoff=0.75)
        hint = f" Did you mean --sglang-{near[0][2:]}?" if near else ""
        problems.append(f"unknown flag --sglang-{flag[2:]}: the installed SGLang server has no {flag}.{hint}")
    return problems


def _attributes(engine: Sequence[str]) -> dict[str, Any]:
    """``["--context-length", "512", "--enable-x"]`` -> ``{"sglang_context_length": 512, "sglang_enable_x": True}``."""
    found: dict[str, list[str]] = {}
    name = ""
    for token in engine:
        if token.startswith("--"):
            name, _, value = token[2:].partition("=")
            found[name] = [value] if value else []
        elif name:
            found[name].append(token)
    attributes: dict[str, Any] = {}
    for key, texts in found.items():
        is_negated = key.startswith("no-") and not texts
        attribute = "sglang_" + (key[3:] if is_negated else key).replace("-", "_")
        values = [_value(text) for text in texts]
        attributes[attribute] = (not is_negated) if not values else values[0] if len(values) == 1 else values
    return attributes


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
