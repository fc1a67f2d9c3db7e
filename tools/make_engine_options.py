"""Write the option tables of SGLang and its router: the flags ``--sglang-*`` and ``--router-*``.

    python tools/make_engine_options.py [--check]

Importing SGLang takes seconds and a gigabyte. ``train.py`` reads these tables instead. Run it after a change of the
installed version. ``--check`` only compares the tables with the installed versions.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

TARGET = Path(__file__).resolve().parent.parent / "slime" / "backends" / "sglang_utils"

_TYPES = {
    "int": "int",
    "float": "float",
    "str": "str",
    "loads": "json",
    "json_list_type": "json",
    "parse_cuda_graph_config_arg": "json",
    "human_readable_int": "int_with_suffix",
    "nullable_str": "str_or_none",
    "parse_cuda_graph_backend_arg": "str",
}
"""Name of the function that converts an option's value -> type in the table."""


def server_table() -> dict[str, Any]:
    """The options of ``sglang.launch_server``, and the defaults of the fields that have none."""
    import msgspec
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(add_help=False)
    ServerArgs.add_cli_args(parser)
    options = [_option(action) for action in parser._actions]
    known = {option["dest"] for option in options}
    fields = {
        item.name: item.default
        for item in msgspec.structs.fields(ServerArgs)
        if item.name not in known and not item.name.startswith("_") and item.default is not msgspec.NODEFAULT
    }
    return {"version": importlib.metadata.version("sglang"), "fields": fields, "options": options}


def router_table() -> dict[str, Any]:
    """The options of the router with their prefix ``--router-``."""
    from sglang_router.router_args import RouterArgs

    parser = argparse.ArgumentParser(add_help=False)
    RouterArgs.add_cli_args(parser, use_router_prefix=True, exclude_host_port=True)
    options = [_option(action) for action in parser._actions]
    return {"version": importlib.metadata.version("sglang_router"), "fields": {}, "options": options}


def _option(action: argparse.Action) -> dict[str, Any]:
    option: dict[str, Any] = {"flags": list(action.option_strings), "dest": action.dest, "kind": _kind(action)}
    if option["kind"] not in ("switch", "boolean"):
        # An unknown converter fails here with a KeyError: a new version of SGLang needs a new row of _TYPES.
        option["type"] = "str" if action.type is None else _TYPES[getattr(action.type, "__name__", str(action.type))]
        option["nargs"] = action.nargs
        if action.choices is not None:
            option["choices"] = sorted(action.choices, key=str)  # some come out of sets
    option["default"] = action.default
    return option


def _kind(action: argparse.Action) -> str:
    match type(action).__name__:
        case "BooleanOptionalAction":
            return "boolean"
        case "_StoreTrueAction" | "DeprecatedStoreTrueAction":
            return "switch"
        case "_AppendAction":
            return "append"
        case "DeprecatedStoreConstAction":
            return "implies"  # its one value sets dest to True
        case "_StoreAction" | "LoRAPathAction":
            return "value"
        case name:
            # Guessing would give the flag a wrong number of values.
            raise SystemExit(f"{action.option_strings}: unknown action {name}: add it to tools/make_engine_options.py")


def text_of(table: dict[str, Any]) -> str:
    """JSON with one option per line, so that a change of version reads well in a diff."""
    head = {name: table[name] for name in ("version", "fields")}
    lines = ",\n".join(json.dumps(option) for option in table["options"])
    return json.dumps(head)[:-1] + ', "options": [\n' + lines + "\n]}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 when a table is out of date")
    options = parser.parse_args()
    for name, table in (("server_options.json", server_table()), ("router_options.json", router_table())):
        path, text = TARGET / name, text_of(table)
        if not options.check:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            sys.exit(f"{path} is not what {table['version']} declares: run python tools/make_engine_options.py")


if __name__ == "__main__":
    main()
