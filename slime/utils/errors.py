"""The exceptions of slime.

Raised for the person who reads the last line of a log: every message says what is wrong, where (flag, file and line,
rank, sample), the offending value, the rule and the fix.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["ConfigError", "DataError", "DeadlineExceeded", "EngineError", "SlimeError"]


class SlimeError(Exception):
    """Base of every error that slime raises on purpose."""


class ConfigError(SlimeError, ValueError):
    """One or more flags cannot work. All problems that were found are in the one message."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        count = len(self.problems)
        head = "" if count == 1 else f"{count} problems with the command line:\n"
        super().__init__(head + "\n".join(self.problems if count == 1 else (f"  - {p}" for p in self.problems)))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[str]]]:
        return type(self), (self.problems,)  # the default would rebuild it from the formatted text


class DataError(SlimeError, ValueError):
    """A data file, a dataset row or a sample does not hold what it must."""


class EngineError(SlimeError, RuntimeError):
    """An inference engine or its router refused, failed or died."""


class DeadlineExceeded(SlimeError, TimeoutError):
    """A wait ran into its deadline; the message says who waited for what, and for how long."""
