"""``python -m slime.testing <flags of a train command>``: check every function that the command names.

    python -m slime.testing --custom-rm-path my_pkg.rewards.reward_func --reward-key score

Exit status 0: no problems; 1: problems; 2: the command line is invalid, or names no function.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from slime.testing import check_command
from slime.utils.errors import ConfigError

_MARKS = {"ok": "ok  ", "signature": "-   ", "bad": "BAD "}


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if words else 2
    try:
        outcomes = check_command(words)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not outcomes:
        print("error: these flags name no user function", file=sys.stderr)
        return 2
    for outcome in outcomes:
        print(f"{_MARKS[outcome.kind]}{outcome.flag} {outcome.path}" + (f" ({outcome.note})" if outcome.note else ""))
        for problem in outcome.problems:
            print(f"    {problem.removeprefix(f'{outcome.flag} {outcome.path}').lstrip(': ')}")
    return int(any(outcome.problems for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
