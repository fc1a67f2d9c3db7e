"""Files of ``torch.save``: writes dumps, and reads the samples of ``--save-debug-rollout-data`` and other dumps."""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from slime.data.sample import Sample
from slime.utils.errors import ConfigError, DataError
from slime.utils.files import replacing

logger = logging.getLogger(__name__)

# Flags whose dumps could not be written.
_warned: set[str] = set()


def dump_path(flag: str, template: str, rollout_id: str) -> Path:
    """The file of a rollout (``"3"``) or an evaluation (``"eval_3"``).

    Raises:
        ConfigError: the template has other placeholders than {rollout_id}.
    """
    try:
        return Path(template.format(rollout_id=rollout_id))
    except (KeyError, IndexError, ValueError) as error:
        raise ConfigError(f"{flag} {template}: the only placeholder is {{rollout_id}} ({error}).") from None


def write_dump(flag: str, path: Path, content: Any) -> bool:
    """Write ``content`` to ``path``, completely or not at all. A full disk must not end a healthy run.

    Returns:
        False if writing failed, with a warning the first time for ``flag``.
    """
    written = 0
    try:
        with replacing(path) as partial:
            try:
                torch.save(content, partial)
            finally:
                # Before ``replacing`` deletes the file: the message needs the number.
                written = partial.stat().st_size if partial.exists() else 0
    except (OSError, RuntimeError) as error:  # torch reports a write that failed as a RuntimeError
        if flag not in _warned:
            _warned.add(flag)
            reason = str(error).strip().splitlines()[0]
            logger.warning(
                "%s: %s was not written, the run goes on without it: the disk refused more than %d bytes (%d free): "
                "%s. Later files are tried without a further warning.",
                *(flag, path, written, _free_bytes(path), reason),
            )
        return False
    return True


def _free_bytes(path: Path) -> int:
    existing = next(parent for parent in path.absolute().parents if parent.exists())
    status = os.statvfs(existing)
    return status.f_bavail * status.f_frsize


def read_samples(flag: str, path: Path) -> list[Sample]:
    """The samples of a dump in the order of the rollout.

    Raises:
        DataError: no such file, or not a dump. The message names ``flag`` and the file.
    """
    try:
        payload = load_saved(path)
    except FileNotFoundError:
        raise DataError(f"{flag}: there is no file {path}; it must be a rollout dump") from None
    except ValueError as error:
        raise _not_a_dump(flag, path, str(error)) from error
    entries = payload.get("samples") if isinstance(payload, Mapping) else None
    if not isinstance(entries, list):
        raise _not_a_dump(flag, path, "it holds no list of samples")
    try:
        return [Sample.from_dict(entry) for entry in entries]
    except (KeyError, TypeError, ValueError) as error:
        raise _not_a_dump(flag, path, f"{type(error).__name__}: {error}") from error


def load_saved(path: Path) -> Any:
    """Load a file of ``torch.save`` to the CPU.

    A file with other objects than tensors and plain values is trusted, with a warning.

    Raises:
        FileNotFoundError: the file is missing.
        ValueError: it cannot be read, with the reason.
    """
    try:
        # A pickle can run any code. ``weights_only`` reads tensors and plain values without running it.
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except pickle.UnpicklingError as error:
        logger.warning("%s holds objects of user code; loading it runs that code. Only load files you made.", path)
        reason = error
    except (OSError, RuntimeError, EOFError) as error:
        raise ValueError(str(error)) from error
    try:
        return torch.load(path, map_location="cpu", weights_only=False)
    except (pickle.UnpicklingError, OSError, RuntimeError, EOFError, ImportError, AttributeError) as error:
        raise ValueError(f"{error}; {reason}") from error
    except (LookupError, TypeError, ValueError) as error:  # of a pickle that is damaged in the middle
        raise ValueError(f"{type(error).__name__}: {error}; {reason}") from error


def _not_a_dump(flag: str, path: Path, reason: str) -> DataError:
    first_line = reason.strip().splitlines()[0] if reason.strip() else "it is empty"
    return DataError(f"{flag}: {path} is not a rollout dump of --save-debug-rollout-data ({first_line})")
