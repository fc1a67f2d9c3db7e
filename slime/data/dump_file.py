"""Files of ``torch.save``: the samples of rollouts, and the batches that the trainer made of them.

``--save-debug-rollout-data``: ``{"rollout_id": int, "samples": [Sample.to_dict(), ...]}``. A later run can train on it
without engines. ``--save-debug-train-data``:

    {"format_version": 2, "rollout_id": int, "rank": int, "samples": [...], "dp_shards": [...], "raw_reward": [...]}

``samples[i]`` is one training row: every per-sample column of the trainer, log-probs and advantages included, with
``rollout_position`` (its place in the rollout and in the dump of samples), ``sample_index`` and ``data_parallel_rank``.
``dp_shards[i]`` is the schedule of a data-parallel rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import logging
import os
import pickle
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from slime.data.columns import column
from slime.data.processing import load_processor, load_tokenizer
from slime.data.sample import Sample, iter_samples
from slime.utils.errors import ConfigError, DataError
from slime.utils.files import replacing

if TYPE_CHECKING:
    import torch.distributed as dist

logger = logging.getLogger(__name__)

# Flags whose dumps could not be written.
_warned: set[str] = set()


def dump_path(flag: str, template: str, **values: str | int) -> Path:
    """The file of a rollout or an evaluation: ``rollout_id=3``, ``rollout_id="eval_3"``.

    Args:
        values: of the placeholders.

    Raises:
        ConfigError: the template has other placeholders.
    """
    try:
        return Path(template.format(**values))
    except (KeyError, IndexError, ValueError) as error:
        only = "the only placeholder is" if len(values) == 1 else "the only placeholders are"
        names = " and ".join(f"{{{name}}}" for name in values)
        raise ConfigError(f"{flag} {template}: {only} {names} ({error}).") from None


def write_dump(flag: str, path: Path, content: Any) -> bool:
    """Write ``content`` to ``path``, completely or not at all. A full disk must not end a healthy run.

    Returns:
        False if writing failed, with a warning the first time for ``flag``.
    """
    written = 0
    try:
        with replacing(path) as partial:
            try:
                import torch  # not above: a driver needs no torch, whose import takes seconds

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
    import torch

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


def load_plain(file: Path | BinaryIO, *, records: tuple[str, ...] = ()) -> Any:
    """Load a file of ``torch.save`` to the CPU, without running code that it names and without needing that code.

    Objects that are not plain, such as those in the flags of another program, are left empty, with a warning.

    Args:
        records: modules whose dataclasses and enums are plain, or packages of such modules with a dot at the end.

    Raises:
        pickle.UnpicklingError, EOFError, OSError, RuntimeError, ValueError: the content is not what was saved.
    """
    import torch

    with contextlib.suppress(RuntimeError):  # not an archive
        archive = torch._C.PyTorchFileReader(str(file) if isinstance(file, Path) else file)
        if "constants.pkl" in archive.get_all_records():  # torch.load would run it, whatever unpickles
            raise ValueError("it is a TorchScript archive, which is code")
    if not isinstance(file, Path):
        file.seek(0)
    plain = plain_pickle(records)
    content = torch.load(file, map_location="cpu", weights_only=False, pickle_module=plain)
    plain.warn(file if isinstance(file, Path) else "a checkpoint")
    return content


def plain_pickle(records: tuple[str, ...] = ()) -> Any:
    """What takes the place of the module ``pickle`` where a pickle must not run code. See :func:`load_plain`."""
    from torch import _weights_only_unpickler as torchs

    safe = torchs._get_allowed_globals() | torchs._get_user_allowed_globals()  # Megatron registers its own
    unknown: set[str] = set()

    def inner_class(owner: Any, name: str) -> Any:
        # a pickle can pass any object
        kind = owner if isinstance(owner, type) else type(owner)
        if _is_record(owner) and _is_record(found := vars(owner).get(name)):
            return found
        if kind is not _Empty:  # else its own name is there
            unknown.add(f"{kind.__name__}.{name}")
        return _Empty

    class PlainUnpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            module = "builtins" if module == "__builtin__" else module  # torch.save writes the names of Python 2
            path = f"{module}.{name}"
            if path in safe:
                return safe[path]
            if path == "builtins.getattr":  # how a class inside of another is named
                return inner_class
            if path in _PLAIN:
                return super().find_class(module, name)
            if module.startswith(records) and _is_record(found := super().find_class(module, name)):
                return found
            unknown.add(path)
            return _Empty

        def load(self) -> Any:
            try:
                return super().load()
            except (AttributeError, ImportError, IndexError, TypeError) as error:  # of damaged content
                raise pickle.UnpicklingError(f"{type(error).__name__}: {error}") from error

    class PlainPickle:
        Unpickler = PlainUnpickler

        @staticmethod
        def load(file: BinaryIO, **options: Any) -> Any:
            return PlainUnpickler(file, **options).load()

        @staticmethod
        def warn(file: Any) -> None:
            if unknown:
                _warn_of_unknown(f"{file} has objects of {', '.join(sorted(unknown))}, which are left empty.")

    return PlainPickle


_PLAIN = (
    "argparse.Namespace",
    "builtins.frozenset",
    "builtins.slice",
    "collections.defaultdict",
    "numpy._core.multiarray._reconstruct",
    "numpy._core.multiarray.scalar",
    "numpy.core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar",
    "numpy.dtype",
    "numpy.ndarray",
    "pathlib.PosixPath",
)
"""Names that only hold data, besides those that torch calls safe. A pickle can have any function called."""


@functools.cache
def _warn_of_unknown(text: str) -> None:
    logger.warning("%s", text)  # once, though some files are read twice


def _is_record(found: Any) -> bool:
    return isinstance(found, type) and (dataclasses.is_dataclass(found) or issubclass(found, enum.Enum))


class _Empty:
    """In place of an object that is not plain: takes whatever a pickle does to it, and forgets it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def _nothing(self, *_: Any, **__: Any) -> Any:
        return self

    __setstate__ = __setitem__ = append = extend = add = __call__ = _nothing


def _not_a_dump(flag: str, path: Path, reason: str) -> DataError:
    first_line = reason.strip().splitlines()[0] if reason.strip() else "it is empty"
    return DataError(f"{flag}: {path} is not a rollout dump of --save-debug-rollout-data ({first_line})")


def save_debug_rollout_data(path_template: str | None, data: Any, *, rollout_id: int, evaluation: bool) -> Path | None:
    """Write the samples of a rollout, or of an evaluation (``eval_<id>``). The file appears complete or not at all.

    Args:
        path_template: ``--save-debug-rollout-data``. None writes nothing.
        data: groups of samples, or the result of an evaluation (data set name -> ``{"samples": [...], ...}``).

    Returns:
        The file. None also if writing failed, which is logged.
    """
    if path_template is None:
        return None
    name = f"eval_{rollout_id}" if evaluation else str(rollout_id)
    path = dump_path("--save-debug-rollout-data", path_template, rollout_id=name)
    samples = [sample.to_dict() for sample in _samples_of(data)]
    content = {"rollout_id": rollout_id, "samples": samples}
    return path if write_dump("--save-debug-rollout-data", path, content) else None


def save_tokenizer(directory: str | None, hf_checkpoint: str) -> None:
    """Put the tokenizer beside the dumps (``<directory>/tokenizer``), so that no checkpoint is needed to read them.

    The processor of a checkpoint for images is in ``<directory>/processor``.
    """
    if directory is None:
        return
    load_tokenizer(hf_checkpoint, trust_remote_code=True).save_pretrained(Path(directory) / "tokenizer")
    processor = load_processor(hf_checkpoint)
    if processor is not None:
        processor.save_pretrained(Path(directory) / "processor")


def load_debug_rollout_data(
    path_template: str, *, rollout_id: int, subsample_ratio: float | None = None
) -> list[Sample]:
    """Read a dump back.

    Args:
        path_template: ``--load-debug-rollout-data``. Without ``{rollout_id}`` the same file serves every rollout.
        subsample_ratio: ``--load-debug-rollout-data-subsample``. Keeps that fraction, half from either end.

    Raises:
        DataError: no such file, or not a dump. Names the flag and the file.
        ConfigError: a template or a fraction that cannot work.
    """
    flag = "--load-debug-rollout-data"
    samples = read_samples(flag, dump_path(flag, path_template, rollout_id=rollout_id))
    if subsample_ratio is None:
        return samples
    if not 0 < subsample_ratio <= 1:
        raise ConfigError(f"--load-debug-rollout-data-subsample {subsample_ratio} must be above 0 and at most 1.")
    # at least one sample, however small the fraction
    keep = max(1, int(len(samples) * subsample_ratio))
    head = keep // 2
    return samples[:head] + samples[len(samples) - (keep - head) :]


def _samples_of(data: Any) -> Iterable[Sample]:
    # training: groups of samples. An evaluation is a mapping with one entry per data set.
    if not isinstance(data, Mapping):
        return iter_samples(data)
    found: list[Sample] = []
    for dataset, result in data.items():
        samples: Sequence[Any] | None = result.get("samples")
        if samples is None:
            raise DataError(f"evaluation of {dataset} returned no samples: --save-debug-rollout-data needs them")
        found.extend(iter_samples(samples))
    return found


_TRAIN_FLAG = "--save-debug-train-data"
_TRAIN_FORMAT = 2
_LAYOUT_FIELDS = ("partition", "micro_batch_indices", "num_microbatches", "global_batch_sizes")
_WHOLE_BATCH_FIELDS = ("raw_reward",)


def save_debug_train_data(
    template: str, *, rollout_id: int, rollout_data: Mapping[str, Any], group: dist.ProcessGroup | None
) -> Path | None:
    """Gather the batches of the data-parallel ranks in ``group`` to its first rank, which writes them to one file.

    The file appears complete or not at all.

    Args:
        rollout_data: the rank's columns of ``slime.data.columns`` with whole responses.
        group: one process of each data-parallel rank. None for a single process.

    Returns:
        The file, on the rank that wrote it. None elsewhere, and if writing failed (which is logged).
    """
    import torch.distributed as dist

    shard = {name: _to_cpu(value) for name, value in rollout_data.items()}
    if group is None:
        rank, number, shards = 0, 0, [shard | {"rank": 0, "data_parallel_rank": 0}]
    else:
        rank, number = dist.get_rank(), dist.get_rank(group)
        shard |= {"rank": rank, "data_parallel_rank": number}
        # Only the first rank of the group receives.
        gathered: list[Any] | None = [None] * dist.get_world_size(group) if number == 0 else None
        dist.gather_object(shard, gathered, dst=dist.get_global_rank(group, 0), group=group)
        shards = gathered or []
    if number != 0:
        return None
    path = dump_path(_TRAIN_FLAG, template, rollout_id=rollout_id, rank=rank)
    payload = build_dump_payload(shards, rollout_id=rollout_id, writer_rank=rank)
    return path if write_dump(_TRAIN_FLAG, path, payload) else None


def build_dump_payload(dp_shards: Sequence[Mapping[str, Any]], *, rollout_id: int, writer_rank: int) -> dict[str, Any]:
    """The contents of the file.

    Args:
        dp_shards: for each data-parallel rank its columns, ``rank`` and ``data_parallel_rank``.
    """
    samples: list[dict[str, Any]] = []
    layouts: list[dict[str, Any]] = []
    for shard in dp_shards:
        num_samples = len(shard["tokens"])
        rows = [name for name, values in shard.items() if _is_per_sample(name, values, num_samples)]
        for index in range(num_samples):
            sample = {name: shard[name][index] for name in rows if name != "sample_indices"}
            sample["data_parallel_rank"] = shard["data_parallel_rank"]
            if "sample_indices" in shard:
                sample["sample_index"] = shard["sample_indices"][index]
            if "partition" in shard:
                sample["rollout_position"] = shard["partition"][index]
            samples.append(sample)
        rest = {name: value for name, value in shard.items() if name not in (*rows, *_WHOLE_BATCH_FIELDS)}
        layouts.append(rest | {"sample_indices": shard.get("sample_indices")})
    payload: dict[str, Any] = {
        "format_version": _TRAIN_FORMAT,
        "rollout_id": rollout_id,
        "rank": writer_rank,
        "samples": _in_order(samples),
        "dp_shards": layouts,
    }
    for name in _WHOLE_BATCH_FIELDS:
        if name in dp_shards[0]:
            payload[name] = dp_shards[0][name]
    return payload


def _in_order(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    # The order of the rollout, so that dumps of different parallel layouts can be compared.
    for key in ("rollout_position", "sample_index"):
        if all(sample.get(key) is not None for sample in samples):
            return sorted(samples, key=lambda sample: sample[key])
    logger.warning("the batch has neither positions nor sample numbers: the dump is in the order of the ranks")
    return samples


def _is_per_sample(name: str, values: Any, num_samples: int) -> bool:
    if name in _LAYOUT_FIELDS or name in _WHOLE_BATCH_FIELDS or column(name).per != "sample":
        return False
    import torch

    return isinstance(values, list | tuple | torch.Tensor) and len(values) == num_samples


def _to_cpu(value: Any) -> Any:
    import torch

    match value:
        case torch.Tensor():
            # a copy: torch.save would write the whole storage of a row that is a view
            return value.detach().to("cpu", copy=True)
        case dict():
            return {name: _to_cpu(item) for name, item in value.items()}
        case list() | tuple():
            return [_to_cpu(item) for item in value]
        case _:
            return value
