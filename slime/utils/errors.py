"""Exceptions of slime.

Every message is complete without the rest of the log. It names the problem, the place (flag, file and line, rank,
sample), the offending value, the rule and the fix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any


class SlimeError(Exception):
    """Base of every error that slime raises on purpose."""

    @property
    def problems(self) -> list[str]:
        """One sentence per problem."""
        return [str(self)]


class ConfigError(SlimeError, ValueError):
    """One or more invalid flags. One message contains all problems that were found."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self._problems = [problems] if isinstance(problems, str) else list(problems)
        count = len(self._problems)
        head = "" if count == 1 else f"{count} problems with the command line:\n"
        super().__init__(head + "\n".join(self._problems if count == 1 else (f"  - {p}" for p in self._problems)))

    @property
    def problems(self) -> list[str]:
        return self._problems

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[str]]]:
        # Ray pickles errors. By default the copy is made from the formatted text, as if it were a single problem.
        return type(self), (self._problems,)


class DataError(SlimeError, ValueError):
    """A data file, a dataset row or a sample is invalid."""


class ScoringError(DataError):
    """A reward function raised, hung, or returned an invalid reward."""


class EngineError(SlimeError, RuntimeError):
    """An inference engine or its router refused, failed or died."""


class RequestRefused(EngineError):
    """An invalid request (4xx). A retry would fail as well, and other requests are not affected."""


class DeadlineExceeded(SlimeError, TimeoutError):
    """A wait exceeded its deadline. The message names the waiter, the awaited event and the seconds."""


class RequestExpired(DeadlineExceeded):
    """A request took longer than its limit. Other requests are not affected."""


class EngineSilent(EngineError, DeadlineExceeded):
    """Engines did not answer in time.

    Attributes:
        urls: addresses of these engines.
    """

    def __init__(self, message: str, urls: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.urls = tuple(urls)


class ProcessDied(SlimeError, RuntimeError):
    """A process of the run ended unexpectedly. The message names the process, its exit and the waiter."""


class StartFailed(ProcessDied):
    """A process died during the start of the run. A restart would fail as well, unless an earlier start succeeded."""


# ---- the reasons to catch any exception. A handler elsewhere names the exceptions that it expects.


def named(error: BaseException) -> str:
    """The kind and the text of an exception: ``ValueError: too short``."""
    return f"{type(error).__name__}: {error}"


@contextmanager
def translated(convert: Callable[[BaseException], Exception], also: type[BaseException] = Exception) -> Iterator[None]:
    """Call code of users, checkpoints or libraries, which may raise anything.

    Args:
        convert: the error to raise instead. The same one continues as it is.
        also: another exception to catch, such as ``SystemExit``.
    """
    try:
        yield
    except (Exception, also) as error:
        converted = convert(error)
        if converted is error:
            raise
        raise converted from error


class reported(AbstractContextManager[None]):
    """Do work whose failure must not end the run: ``report`` gets the error, and the block ends."""

    def __init__(self, report: Callable[[Exception], object]) -> None:
        self._report = report

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if is_error := isinstance(error, Exception):
            self._report(error)
        return is_error


@contextmanager
def kept(errors: list[Any], also: type[BaseException] = Exception) -> Iterator[None]:
    """Do work that others wait for, such as other ranks in a collective: the error is appended, to be raised later."""
    try:
        yield
    except (Exception, also) as error:
        errors.append(error)


@contextmanager
def undone(undo: Callable[[], object]) -> Iterator[None]:
    """Call ``undo`` if the block ends with any exception, Ctrl-C and cancellation included, which then continues."""
    try:
        yield
    except BaseException:
        undo()
        raise
