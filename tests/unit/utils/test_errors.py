"""The context managers that catch any exception."""

from __future__ import annotations

import logging

import pytest

from slime.utils.errors import ConfigError, DataError, kept, named, reported, translated, undone


def test_translated_raises_the_other_error_with_its_cause() -> None:
    cause = KeyError("x")
    with pytest.raises(DataError, match="the template: KeyError: 'x'") as caught, translated(_bad_template):
        raise cause
    assert caught.value.__cause__ is cause


def test_translated_lets_an_error_pass_that_the_conversion_returns() -> None:
    error = ConfigError("a known problem")
    with pytest.raises(ConfigError) as caught, translated(lambda found: error):
        raise error
    assert caught.value is error
    assert caught.value.__cause__ is None


def test_translated_catches_an_exit_only_if_asked() -> None:
    with pytest.raises(SystemExit), translated(_bad_template):
        raise SystemExit(3)
    with pytest.raises(DataError, match="SystemExit: 3"), translated(_bad_template, SystemExit):
        raise SystemExit(3)


def test_reported_goes_on_and_logs_with_the_traceback(caplog: pytest.LogCaptureFixture) -> None:
    with reported(lambda _: logging.getLogger("test").exception("closing failed")):
        raise OSError("the disk is full")
    [record] = caplog.records
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == "the disk is full"
    with pytest.raises(KeyboardInterrupt), reported(lambda _: None):
        raise KeyboardInterrupt


def test_kept_holds_the_error_for_later() -> None:
    errors: list[Exception] = []
    with kept(errors):
        pass
    assert not errors
    with kept(errors):
        raise StopIteration(1)
    assert named(errors[0]) == "StopIteration: 1"


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_undone_cleans_up_and_raises(error: BaseException) -> None:
    calls: list[int] = []
    with undone(lambda: calls.append(0)):
        pass
    assert not calls
    with pytest.raises(type(error)), undone(lambda: calls.append(1)):
        raise error
    assert calls == [1]


def _bad_template(error: BaseException) -> DataError:
    return DataError(f"the template: {named(error)}")
