"""The exceptions of slime.

Raised for the person who reads the last line of a log: every message says what is wrong, where (flag, file and line,
rank, sample), the offending value, the rule and the fix.
"""

from __future__ import annotations

from collections.abc import Sequence


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


class ScoringError(DataError):
    """A reward function raised, hung, or returned an invalid reward."""


class EngineError(SlimeError, RuntimeError):
    """An inference engine or its router refused, failed or died."""


class RequestRefused(EngineError):
    """A request that is wrong in itself (4xx): sending it again would not help, and others are not concerned."""


class DeadlineExceeded(SlimeError, TimeoutError):
    """A wait ran into its deadline; the message says who waited for what, and for how long."""


class EngineSilent(EngineError, DeadlineExceeded):
    """Engines did not answer in time.

    Attributes:
        urls: of these engines.
    """

    def __init__(self, message: str, urls: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.urls = tuple(urls)


class ProcessDied(SlimeError, RuntimeError):
    """A process of the run ended without being asked to; the message says which, how, and who waited for it."""


class StartFailed(ProcessDied):
    """A process died while the run was starting: the next start would fail, too, unless an earlier one did not."""
