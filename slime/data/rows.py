"""Rows of prompt sources: JSONL and Parquet files, folders and Hub data sets of the package datasets.

Every error names file, line and key.
"""

from __future__ import annotations

import codecs
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from slime.data.prepare import Row
from slime.data.values import parse_json, plain_value
from slime.utils.errors import DataError, kept, named, translated
from slime.utils.prompt_sources import FILE_SUFFIXES, DatasetId, dataset_id, parse_path

# Types of Parquet columns.
_NOT_JSON = ("timestamp", "date", "time", "decimal", "duration")
_CHECK_ALL_BELOW_BYTES = 64 * 1024**2
_ROWS_AT_ONCE = 1000
_DEFAULT_SPLIT = "train"


class _MissingFile(DataError, FileNotFoundError):
    """Both, because callers of ``read_file`` may catch either."""


def read_file(path: str) -> Iterator[Row]:
    """The rows of a source, optionally of a slice of them (``path@[start:stop]``).

    Raises:
        DataError: no such file (also a FileNotFoundError), another format, or a line that is not a JSON object.
    """
    for _, row in numbered_rows(path):
        yield row


def check_prompt_file(flag: str, path: str) -> Iterator[str]:
    """Problems of the source that ``flag`` names, found without a tokenizer. Of large files only row one is read."""
    file = Path(parse_path(path)[0])
    if file.suffix in FILE_SUFFIXES and not file.exists():
        yield f"{flag} {path}: there is no such file."
        return
    try:
        rows = numbered_rows(path)
        is_small = file.is_file() and file.stat().st_size < _CHECK_ALL_BELOW_BYTES
        count = sum(1 for _ in (rows if is_small else itertools.islice(rows, 1)))
    except (OSError, DataError, ImportError) as error:
        yield f"{flag} {path}: {error}"
    else:
        if count == 0:
            yield f"{flag} {path}: there is no row in it."


def numbered_rows(path: str, on_problem: Callable[[DataError], None] | None = None) -> Iterator[tuple[str, Row]]:
    """Rows with their place, for error messages.

    Args:
        on_problem: called with the error of each invalid line, which is then left out. None: the error is raised.
    """
    file, part = parse_path(path)
    rows = _rows(file, on_problem)
    if part is None:
        return rows
    if (part.start or 0) >= 0 and (part.stop or 0) >= 0:
        return itertools.islice(rows, part.start, part.stop)
    return iter(list(rows)[part])  # negative bounds need the length


def _rows(file: str, on_problem: Callable[[DataError], None] | None) -> Iterator[tuple[str, Row]]:
    found = dataset_id(file)
    if found is not None:
        return _dataset_rows(found)
    suffix = Path(file).suffix
    if suffix not in FILE_SUFFIXES:
        raise DataError(
            f"{file}: prompt files must end in {' or '.join(FILE_SUFFIXES)}; there is no folder of this name, and a "
            "data set of the Hub is written ORG/NAME[@REVISION][:CONFIG[:SPLIT]]"
        )
    if not Path(file).is_file():
        raise _MissingFile(f"there is no file {file} (--prompt-data, --eval-prompt-data)")
    return _jsonl_rows(file, on_problem) if suffix == ".jsonl" else _parquet_rows(file)


def _jsonl_rows(file: str, on_problem: Callable[[DataError], None] | None) -> Iterator[tuple[str, Row]]:
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if number == 1:
                # Some editors write a byte order mark.
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line.strip():
                continue
            where = f"{file}:{number}"
            try:
                row = _row(where, line)
            except DataError as error:
                if on_problem is None:
                    raise
                on_problem(error)
            else:
                yield where, row


def _row(where: str, line: bytes) -> Row:
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8: {error.reason} at byte {error.start + 1} of the line") from None
    row = parse_json(where, text)
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected a JSON object, found {type(row).__name__}")
    return row


def _parquet_rows(file: str) -> Iterator[tuple[str, Row]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ImportError(f"{file}: reading Parquet needs pyarrow (pip install 'slime[parquet]')") from None
    try:
        table = parquet.ParquetFile(file)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise DataError(f"{file}: not a Parquet file: {error}") from None
    yield from _arrow_rows(file, table.schema_arrow, table.iter_batches())


def _arrow_rows(name: str, schema: Any, batches: Iterator[Any]) -> Iterator[tuple[str, Row]]:
    """Rows of Arrow tables or record batches."""
    import pyarrow

    # Converting every row is slow, so it is done only if a column needs it.
    has_other_types = any(kind in str(schema) for kind in _NOT_JSON)
    number = 0
    try:
        for batch in batches:
            for row in batch.to_pylist(maps_as_pydicts="strict"):
                number += 1
                yield f"{name} row {number}", plain_value(row) if has_other_types else row
    except (OSError, ValueError, KeyError, pyarrow.ArrowException) as error:
        raise DataError(f"{name}: cannot be read after row {number}: {error}") from None


def _dataset_rows(source: DatasetId) -> Iterator[tuple[str, Row]]:
    # As Arrow tables: the rows of a Parquet file of the same content, images as bytes.
    data = _load(source).with_format("arrow")
    yield from _arrow_rows(source.id, data.features.arrow_schema, data.iter(batch_size=_ROWS_AT_ONCE))


def _load(source: DatasetId) -> Any:
    """The ``datasets.Dataset`` of one split."""
    try:
        import datasets
    except ImportError:
        raise ImportError(f"{source.id}: data sets need the package datasets (pip install 'slime[datasets]')") from None
    folder = Path(source.id)
    place = "folder" if source.is_folder else "data set of the Hub, and there is no folder of this name"

    def unreadable(error: BaseException) -> DataError:
        cause = f"{named(error)} {error.__cause__ or ''}".strip()
        return DataError(f"{source.id}: cannot be loaded as a {place}: {cause}")

    with translated(unreadable):  # errors of files, networks and formats, of many kinds
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            data = datasets.load_from_disk(source.id)
        else:
            data = _result(source)
    if not isinstance(data, dict):
        return data
    split = source.split or (_DEFAULT_SPLIT if len(data) > 1 else next(iter(data)))
    if split not in data:
        config = source.config or ""
        raise DataError(
            f"{source.id}: it has no split {split}, but {', '.join(data)}: name one as {source.id}:{config}:SPLIT"
        )
    return data[split]


def _result(source: DatasetId) -> Any:
    found = _from_hub(source)
    if isinstance(found, Exception):
        raise found
    return found


@functools.lru_cache(maxsize=16)
def _from_hub(source: DatasetId) -> Any:
    """A data set of the Hub, or of a folder of data files, with all its splits; else the error.

    Once per process, also after an error: the library asks a server, several times if that does not answer.
    """
    import datasets

    errors: list[Exception] = []  # raised by the caller, for every reader of this source
    with kept(errors):
        return datasets.load_dataset(source.id, name=source.config, revision=source.revision)
    return errors[0]


# The identity of a source: kept in the data state, and compared when a run is resumed.
#
# The digest covers the whole file up to 64 MiB. Of a larger file it covers 64 blocks of 1 MiB at equal distances,
# with the first and the last block: an edit between the blocks that keeps the size is not noticed. The cost is to read
# at most 64 MiB, once per start. Of a data set it covers in the same way 4096 rows.

_BLOCK = 1024**2
_NUM_BLOCKS = 64
_NUM_ROWS = 4096


def identity(path: str) -> dict[str, Any] | None:
    """``size`` in ``unit`` (bytes of a file, rows of a data set), ``digest``, ``slice``. None without such a source."""
    name, part = parse_path(path)
    bounds = None if part is None else [part.start, part.stop]
    if Path(name).is_file():
        return {"size": Path(name).stat().st_size, "unit": "bytes", "digest": _digest(Path(name)), "slice": bounds}
    found = dataset_id(name)
    if found is None:
        return None
    data = _load(found)
    return {"size": len(data), "unit": "rows", "digest": _digest_of_rows(data), "slice": bounds}


def _digest(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    size = path.stat().st_size
    step = (size - _BLOCK) / (_NUM_BLOCKS - 1)
    is_small = size <= _NUM_BLOCKS * _BLOCK
    starts = range(0, size, _BLOCK) if is_small else (int(step * i) for i in range(_NUM_BLOCKS))
    with path.open("rb") as file:
        for start in starts:
            file.seek(start)
            digest.update(file.read(_BLOCK))
    return digest.hexdigest()


def _digest_of_rows(data: Any) -> str:
    digest = hashlib.blake2b(digest_size=16)
    numbers = list(range(len(data)))
    if len(data) > _NUM_ROWS:
        numbers = [i * (len(data) - 1) // (_NUM_ROWS - 1) for i in range(_NUM_ROWS)]
    table = data.with_format("arrow")[numbers]
    for row in table.to_pylist():
        digest.update(repr(row).encode(errors="backslashreplace"))
    return digest.hexdigest()
