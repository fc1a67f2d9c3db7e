"""Megatron options that this trainer does not read: known by name, so that using one is not reported as a typo.

Two tables: the fields of megatron-core's dataclasses (``core_options.json``, written by
``tools/make_megatron_options.py`` and kept current by a test), and ``launcher_options.csv``:

    flag       its spelling without dashes
    name       attribute of args, if it does not follow from the flag
    kind       int, float, str, ints, strs, switch, off; "core": the option itself is in core_options.json
    no_effect  reason why it is accepted without effect; empty: using it is an error
    help       text for --help; options without one are hidden
"""

from __future__ import annotations

import argparse
import csv
import functools
import json
from collections.abc import Iterable, Iterator
from dataclasses import field, make_dataclass
from pathlib import Path
from typing import Any

from slime.config.groups import flags_of

_NOT_READ = "this trainer does not have that part of Megatron"
_TYPES: dict[str, Any] = {
    "int": int | None,
    "float": float | None,
    "str": str | None,
    "ints": list[int] | None,
    "strs": list[str] | None,
    "switch": bool,
    "off": bool,
}
_FOLDER = Path(__file__).resolve().parent


def core_options() -> Iterator[dict[str, Any]]:
    """The options that megatron-core's dataclasses imply: ``flags``, ``dest``, ``kind``, ``default``."""
    yield from json.loads((_FOLDER / "core_options.json").read_text(encoding="utf-8"))["options"]


@functools.cache
def _rows() -> dict[str, dict[str, str]]:
    with (_FOLDER / "launcher_options.csv").open(encoding="utf-8", newline="") as file:
        return {f"--{row['flag']}": row for row in csv.DictReader(file)}


def launcher_options(*, documented: bool = False) -> Iterator[dict[str, Any]]:
    """The options of Megatron-LM's own parser, in the form of :func:`core_options`; most defaults are "not given"."""
    for flag, row in _rows().items():
        if row["kind"] != "core" and bool(row["help"]) == documented:
            default: Any = {"switch": False, "off": True}.get(row["kind"])  # None: not given
            if row["default"]:
                default = {"int": int, "float": float, "str": str}[row["kind"]](row["default"])
            yield {
                "flags": [flag],
                "dest": row["name"] or row["flag"].replace("-", "_"),
                "kind": row["kind"],
                "default": default,
            }


def runtime_flags() -> type:
    """The group of documented options that have no effect."""
    fields = [
        (option["dest"], _type(option), _field(option, option["flags"])) for option in launcher_options(documented=True)
    ]
    namespace = {"__doc__": "Megatron's runtime, accepted for scripts."}
    return make_dataclass("RuntimeArgs", fields, frozen=True, namespace=namespace)


def other_flags(groups: Iterable[type]) -> type:
    """The group of every other option of Megatron that none of ``groups`` declares. Hidden in ``--help``.

    Using one is "not supported yet", unless it could not change a number; its default changes nothing and is allowed.
    """
    dests: set[str] = set()
    spellings: set[str] = set()
    for declared in flags_of(list(groups)):
        dests.add(declared.name)
        spellings.update(declared.spellings)
        spellings.add("--no-" + declared.spellings[0].removeprefix("--"))
    fields = []
    for option in (*core_options(), *launcher_options()):
        free = [spelling for spelling in option["flags"] if spelling not in spellings]
        if not free or option["dest"] in dests:
            continue
        dests.add(option["dest"])
        spellings.update(free)
        fields.append((option["dest"], _type(option), _field(option, free)))
    return make_dataclass("OtherMegatronArgs", fields, repr=False, eq=False, namespace={"__doc__": "Megatron, other."})


def _type(option: dict[str, Any]) -> Any:
    return _TYPES[option["kind"]]


def _field(option: dict[str, Any], spellings: list[str]) -> Any:
    row = _rows().get(spellings[0], {})
    metadata = {"help": row.get("help") or argparse.SUPPRESS, "off": spellings[0], "flags": tuple(spellings[1:])}
    reason = row.get("no_effect")
    return field(
        default=option["default"], metadata=metadata | ({"no_effect": reason} if reason else {"later": _NOT_READ})
    )
