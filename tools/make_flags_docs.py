"""Write docs/flags.md: every flag by group, and the flags that differ on purpose, are missing, or have no effect.

    python tools/make_flags_docs.py            write the file
    python tools/make_flags_docs.py --check    exit with 1 when it is not current

The content comes from the argument groups. The differences are in docs/flag_differences.csv.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from slime.config.groups import Flag, flags_of
from slime.config.parse import build_parser
from slime.ray.arguments import GROUPS

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "flags.md"
DIFFERENCES = ROOT / "docs" / "flag_differences.csv"

HEAD = """\
---
search:
  boost: 0.2
---

# Flags

Look up a flag of `train.py` or `train_async.py`. `tools/make_flags_docs.py` writes this page.

One command line holds three namespaces:

| spelling | belongs to | readable as |
|---|---|---|
| `--name` | slime and the trainer (Megatron's names), all listed below | `args.name` |
| `--sglang-<name>` | the SGLang server: all its options, except those that slime computes | `args.sglang_<name>` |
| `--router-<name>` | the router in front of the engines | `args.router_<name>` |

**Precedence:** a flag on the command line (the last of several) > a value in `--custom-config-path` (YAML) > a preset
(`scripts/models/*.sh` puts its flags first, so that later ones win) > the default. Values of the YAML file take the
type of the flag that they name and are applied before anything is derived; its other keys become attributes of `args`.
`--megatron-config-path` then changes single values for one training role.

**Derived:** a value that is not given may follow from others. `python train.py ... --plan` lists each with its reason.
**Unknown** flags are a warning with the nearest match, because older launch scripts contain some. `--strict-args` makes
every warning an error. All problems of a command are reported in one message, before anything starts.
"""


def page() -> str:
    """The whole page."""
    flags = list(flags_of(GROUPS))
    parts = [HEAD, *_groups(flags), _differences(), _later(flags), _no_effect(flags)]
    return "\n".join(parts)


def _groups(flags: list[Flag]) -> Iterator[str]:
    values = _values()
    # groupby joins neighbors only: flags_of lists the flags group by group.
    for title, members in groupby(flags, key=lambda flag: flag.group):
        shown = [flag for flag in members if flag.later is None]
        rows = [[_names(flag), values[flag.spellings[0]], _default(flag), flag.help] for flag in shown]
        if rows:
            yield f"## {title}\n\n{_table(['flag', 'value', 'default', 'meaning'], rows)}"


def _differences() -> str:
    with DIFFERENCES.open(encoding="utf-8", newline="") as file:
        rows = [[f"`{row['flag']}`", row["why"]] for row in csv.DictReader(file)]
    text = "Flags of existing launch scripts with another or a wider meaning.\n\n"
    return f"## Deliberate differences\n\n{text}{_table(['flag', 'here'], rows)}"


def _later(flags: list[Flag]) -> str:
    by_reason: dict[str, list[str]] = {}
    for flag in flags:
        if flag.later:
            by_reason.setdefault(flag.later, []).append(_names(flag))
    text = "These flags parse, but a value other than the default is an error.\n\n"
    lines = [f"{why[0].upper()}{why[1:]}: {', '.join(names)}.\n" for why, names in by_reason.items()]
    return f"## Not supported yet\n\n{text}" + "\n".join(lines)


def _no_effect(flags: list[Flag]) -> str:
    rows = [[_names(flag), flag.no_effect] for flag in flags if flag.no_effect]
    text = "Accepted because launch scripts pass them.\n\n"
    return f"## Accepted without effect\n\n{text}{_table(['flag', 'because'], rows)}"


def _values() -> dict[str, str]:
    """First spelling -> its value in the table. Empty for a switch."""
    actions = build_parser(GROUPS)._option_string_actions
    return {spelling: _value(action) for spelling, action in actions.items()}


def _value(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    if action.choices is not None:
        # An unescaped "|" would end the cell of the table.
        text = " \\| ".join(f"`{choice}`" for choice in action.choices)
    else:
        kinds = {"int": "integer", "float": "number", "json_object": "JSON", "str": "text"}
        name = getattr(action.type, "__name__", "str")
        text = str(action.metavar) if action.metavar else kinds.get(name, name)
    return text + (" ..." if action.nargs in ("+", "*") else "")


def _names(flag: Flag) -> str:
    return ", ".join(f"`{spelling}`" for spelling in flag.spellings)


def _default(flag: Flag) -> str:
    match flag.default:
        case None | False | [] | {}:
            return ""
        case True:
            # A spelling that negates the name (--no-x) turns x off. Not given, it shows no default, like any switch.
            return "on" if flag.spellings[0].startswith(f"--{flag.name.replace('_', '-')}") else ""
        case list():
            return " ".join(f"`{item}`" for item in flag.default)
        case _:
            return f"`{flag.default}`"


def _table(head: list[str], rows: list[list[str | None]]) -> str:
    if not rows:
        return "None.\n"
    lines = [head, ["---"] * len(head), *[[(cell or "").replace("\n", " ") for cell in row] for row in rows]]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="Write nothing; exit with 1 when the page is not current.")
    check = parser.parse_args().check
    text = page()
    if check:
        is_current = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text
        print(f"{PAGE} is current" if is_current else f"{PAGE} is not current: run {Path(__file__).name}")
        return 0 if is_current else 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
