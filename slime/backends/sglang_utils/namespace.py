"""The engine's part of the command line: ``--sglang-*`` for the server, ``--router-*`` for the router.

Called by ``slime.config.parse`` before slime's own flags are parsed. Every option is checked and typed here. Every
field of the server and the router becomes an attribute, with its default. Their processes receive the user's words
under the names of the installed version.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime.backends.sglang_utils.option_table import (
    ALIASES,
    ALWAYS,
    CONTROLLED,
    REMOVED,
    RENAMED,
    Option,
    OptionTable,
    router_options,
    server_options,
)
from slime.config.groups import Notice
from slime.config.parse import HINT, UNKNOWN, EngineNamespace
from slime.utils.misc import flag

_SERVER = "--sglang-"
_ROUTER = "--router-"
_UNPREFIXED = ("--worker-urls",)  # options of the router without a prefix
_UNUSED_BY_ROUTER = ("--router-cb-", "--router-health-")
_MAX_CHOICES = 12


@dataclass
class _Reading:
    """Options of one program: attribute values, words for its parser, problems and notices."""

    prefix: str
    table: OptionTable
    values: dict[str, Any] = field(default_factory=dict)
    given: set[str] = field(default_factory=set)
    argv: dict[str, list[str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)

    def warn(self, flag: str, text: str) -> None:
        self.notices.append(Notice("warning", flag, text))


def read_engine(tokens: Sequence[str], own: Collection[str]) -> EngineNamespace:
    """Take the options of server and router out of ``tokens``. Those in ``own`` are declared by slime and stay."""
    rest, engine = _split(tokens, own)
    server = _Reading("sglang_", server_options())
    router = _Reading("router_", router_options())
    for shown, words in engine:
        if shown.startswith((_SERVER, "--no-sglang-")):
            _read_server(server, shown, words)
        else:
            _read_router(router, shown, words)
    for reading in (server, router):
        if reading.table.note and reading.given:
            reading.warn(reading.table.program, reading.table.note)
    return EngineNamespace(
        rest=rest,
        attributes={**_server_attributes(server), **router.table.defaults, **router.values},
        given=frozenset(server.given | router.given),
        argv=[word for words in server.argv.values() for word in words],
        router_argv=[word for words in router.argv.values() for word in words],
        problems=server.problems + router.problems,
        notices=server.notices + router.notices,
    )


def _split(tokens: Sequence[str], own: Collection[str]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """(words of other flags, (flag, words) of the engine's). Words belong to the flag before them."""
    rest: list[str] = []
    engine: list[tuple[str, list[str]]] = []
    target = rest
    for token in tokens:
        if token.startswith("--"):
            flag, equals, value = token.partition("=")
            prefixed = flag.startswith((_SERVER, "--no-sglang-", _ROUTER, "--no-router-")) or flag in _UNPREFIXED
            if prefixed and flag not in own:
                target = [value] if equals else []
                engine.append((flag, target))
                continue
            target = rest
        target.append(token)
    return rest, engine


def _read_server(reading: _Reading, shown: str, words: list[str]) -> None:
    is_negated = shown.startswith("--no-")
    flag = "--" + shown.removeprefix("--no-").removeprefix("--").removeprefix("sglang-")
    table = reading.table.by_flag
    if flag not in table and RENAMED.get(flag) in table:
        new = RENAMED[flag]
        reading.notices.append(Notice("info", shown, f"SGLang calls it --sglang-{new[2:]} today; passed on as that"))
        flag = new
    if flag not in table and flag in REMOVED:
        reading.warn(shown, f"dropped: the installed SGLang server has no such option; {REMOVED[flag]}")
        return
    option = table.get(flag)
    if option is None:
        reading.warn(shown, _unknown(flag, reading.table, _SERVER))
    elif option.dest in ALWAYS:
        reading.warn(shown, f"dropped: {ALWAYS[option.dest]}")
    elif option.dest in CONTROLLED:
        reading.warn(shown, f"dropped: it {CONTROLLED[option.dest]}")
    else:
        _take(reading, option, flag, shown, words, is_negated=is_negated)


def _read_router(reading: _Reading, shown: str, words: list[str]) -> None:
    is_negated = shown.startswith("--no-")
    flag = shown.replace("--no-", "--", 1) if is_negated else shown
    option = reading.table.by_flag.get(flag)
    if option is None:
        reading.warn(shown, _unknown(flag, reading.table, "--"))
        return
    if flag.startswith(_UNUSED_BY_ROUTER):
        reading.warn(shown, "no effect: the router's health checks and circuit breaker are off, slime watches engines")
    if option.dest == "router_pd_disaggregation":
        reading.warn(shown, "dropped: it follows from --prefill-num-servers or --sglang-config")
        return
    _take(reading, option, flag, shown, words, is_negated=is_negated)


def _take(reading: _Reading, option: Option, flag: str, shown: str, words: list[str], *, is_negated: bool) -> None:
    """Check and keep one option."""
    try:
        value = option.value_of(words)
        if is_negated and option.kind not in ("switch", "boolean", "unknown"):
            raise ValueError("is not a switch, so there is nothing to turn off")
    except ValueError as error:
        reading.problems.append(_bad_value(shown, words, option, str(error)))
        return
    name = option.dest if reading.prefix == "router_" else reading.prefix + option.dest
    reading.given.add(name)
    if option.kind == "append":
        reading.values[name] = [*(reading.values.get(name) or []), value]
        reading.argv.setdefault(option.dest, []).extend(_spelled(flag, words))
        return
    reading.values[name] = not is_negated if option.kind in ("switch", "boolean") else value
    reading.argv.pop(option.dest, None)  # the last option of a field wins, as in argparse
    if option.dest == "tp_size" and reading.prefix == "sglang_":
        return  # slime passes it, from --rollout-num-gpus-per-engine, which this may set
    if not is_negated:
        reading.argv[option.dest] = _spelled(flag, words)
    elif option.kind == "boolean":
        reading.argv[option.dest] = ["--no-" + flag[2:]]


def _spelled(flag: str, words: list[str]) -> list[str]:
    # after a space, argparse may read a value that begins with "-" as an option
    if len(words) == 1 and (not words[0] or words[0].startswith("-")):
        return [f"{flag}={words[0]}"]
    return [flag, *words]


def _server_attributes(reading: _Reading) -> dict[str, Any]:
    """Every field except those that only slime sets."""
    hidden = CONTROLLED.keys() | ALWAYS.keys()
    found = {"sglang_" + name: value for name, value in reading.table.defaults.items() if name not in hidden}
    found |= reading.values
    found |= {alias: found[name] for name, alias in ALIASES.items() if name in found}
    return found


def _unknown(flag: str, table: OptionTable, prefix: str) -> str:
    near = difflib.get_close_matches(flag, table.flags, n=1, cutoff=0.75)
    hint = f"; {HINT} {prefix}{near[0][2:]}?" if near else ""
    return f"{UNKNOWN}, ignored with its values: the installed {table.program} has no {flag}{hint}"


def _bad_value(shown: str, words: list[str], option: Option, reason: str) -> str:
    if option.choices is not None and "is not one of" in reason:
        wrong = next((word for word in words if word not in map(str, option.choices)), "")
        names = [str(choice) for choice in option.choices]
        near = difflib.get_close_matches(wrong, names, n=1, cutoff=0.6)
        hint = f" Did you mean {near[0]}?" if near else ""
        return f"{shown} {wrong} is not one of {_listed(names)}.{hint}"
    return f"{shown}: {reason}."


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MAX_CHOICES
    return ", ".join(names) if more <= 0 else f"{', '.join(names[:_MAX_CHOICES])} and {more} more"


# Flags of engines and router that slime itself reads; ``--sglang-*`` and ``--router-*`` are in ``namespace``.


@dataclass(frozen=True)
class EngineArgs:
    """Inference engines; --sglang-<flag> is any flag of the server, --router-<flag> of the router."""

    sglang_router_ip: str | None = flag(
        None, "Address of a router that runs already, together with its port. Default: slime starts one per run."
    )
    sglang_router_port: int | None = flag(None, "Port of the router; any free one by default.")
    sglang_router_request_timeout_secs: int = flag(14400, "Seconds the router waits for an engine's answer.")
    sglang_server_concurrency: int = flag(512, "Samples generated at once, per engine.")
    sglang_config: str | None = flag(None, "YAML file of models and groups of engines to serve them.", metavar="FILE")
    prefill_num_servers: int | None = flag(None, "Engines that only prefill; the others only decode.")
    engine_start_timeout: float | None = flag(
        None,
        "Seconds until an engine must be healthy, even if it still works. One that does nothing for ten "
        "minutes fails earlier. Default: 3600, or more for a large checkpoint: 600 + bytes / 200 MB/s.",
    )
