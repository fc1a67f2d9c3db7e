"""Fixtures shared by all rooms."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_timeout

from tests.limits import Limit
from tests.verification import write_page
from tools.make_tiny_task import TinyTask, make_tiny_task

_ISA_LIMITS = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")


def pytest_configure(config: pytest.Config) -> None:
    is_part = bool(config.option.keyword) or any("::" in arg for arg in config.args)
    if os.environ.get("SLIME_WRITE_TABLES") == "1" and is_part:
        raise pytest.UsageError("SLIME_WRITE_TABLES=1 writes the tables of whole files: run them without -k and ::")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Without the garbage collector, which would visit the growing set of modules and tests for a third of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_sessionfinish() -> None:
    gc.unfreeze()
    write_page()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The instructions that numbers are computed with: oneDNN, ATen and MKL each have their own limit."""
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    best = [name for name in ("amx_bf16", "amx_tile", "avx512_bf16", "avx512f", "avx2") if name in flags]
    limits = [f"{name}={os.environ[name]}" for name in _ISA_LIMITS if name in os.environ]
    terminalreporter.write_line(f"CPU: {' '.join(best)}; limits: {' '.join(limits) or 'none'}")


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: Any, settings: Any) -> bool:
    """The limit of a test counts seconds of an otherwise idle machine."""
    limit = Limit(settings.timeout)

    def look(*_: Any) -> None:
        if limit.is_over:
            pytest_timeout.timeout_sigalrm(item, settings)
        signal.setitimer(signal.ITIMER_REAL, max(1.0, limit.seconds - limit.used))

    def cancel() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    item.cancel_timeout = cancel
    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, settings.timeout)
    return True


@pytest.fixture(scope="module", autouse=True)
def _garbage_is_only_looked_for_in_new_objects() -> None:
    """The end of a trainer collects garbage, for 2 s if it looks at all imports and collected tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _no_process_group_is_left() -> Iterator[None]:
    """A module that leaves torch.distributed initialized breaks the modules that run next in the same process."""
    yield
    dist = sys.modules.get("torch.distributed")
    assert dist is None or not dist.is_initialized(), "the tests of this module leave a process group behind"


@pytest.fixture(scope="session")
def tiny_task(tmp_path_factory: pytest.TempPathFactory) -> TinyTask:
    """A tiny Qwen3 with random weights and addition problems. Paths are strings. Treat the files as read-only."""
    return make_tiny_task(tmp_path_factory.mktemp("tiny_task"))
