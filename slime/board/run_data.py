"""The data of the board, from the files in a run's folder. Called by ``server``.

The table of samples is a query over the light columns of all sample files, which stay in memory once they are read; one
sample is read whole only when the page shows it.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import operator
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from slime.data.columns import TRAINER_VALUES
from slime.observability.metric_table import MetricEntry, describe
from slime.observability.run_info import RunInfo, read_run_info
from slime.observability.sample_record import FOLDER, LIGHT, record_file, train_files
from slime.utils.errors import DataError

logger = logging.getLogger(__name__)

Kind = Literal["rollout", "eval"]

_NAME = re.compile(r"^(rollout|eval)_(\d+)\.parquet$")
# Without a new record for this time the run counts as ended.
_LIVE_S = 120.0
_SORTABLE = ("rollout", *LIGHT)


@dataclass(frozen=True)
class SampleQuery:
    """A selection of rows. None means no condition.

    Attributes:
        rollout: its number.
        text: part of the beginning of a response, in any case.
        order: column; ``descending`` begins with the largest.
    """

    kind: Kind = "rollout"
    rollout: int | None = None
    status: str | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    min_length: int | None = None
    max_length: int | None = None
    group: int | None = None
    text: str | None = None
    order: str = "position"
    descending: bool = False
    offset: int = 0
    limit: int = 50


class RunData:
    """The folder of one run.

    Raises:
        DataError: ``run`` is not the folder of a run.
    """

    def __init__(self, run: Path) -> None:
        self.run = run
        self.info: RunInfo = read_run_info(run)
        self._metrics = MetricFile(run / "metrics.jsonl")
        self._tables: dict[Path, tuple[int, pa.Table | None]] = {}
        self._texts = TokenTexts(self.info.resolved(self.info.hf_checkpoint))
        self._lock = threading.Lock()

    def overview(self) -> dict[str, Any]:
        """Name, command and recorded samples; cheap enough for a request every other second."""
        rollouts = self._recorded("rollout")
        with self._lock:
            self._metrics.refresh()
        age = time.time() - (self._metrics.last_time or self.info.started)
        return {
            "name": self.run.name,
            "folder": str(self.run),
            "driver": self.info.driver,
            "argv": self.info.argv,
            "started": self.info.started,
            "model": self.info.hf_checkpoint,
            "is_live": age < _LIVE_S,
            "age_s": age,
            # After a change the page loads curves and samples again.
            "version": self._metrics.size + len(rollouts),
            "rollouts": rollouts,
            "evals": self._recorded("eval"),
        }

    def metrics(self) -> dict[str, Any]:
        """All curves."""
        with self._lock:
            self._metrics.refresh()
            return self._metrics.series()

    def samples(self, query: SampleQuery) -> dict[str, Any]:
        """Rows of the table, and their total number."""
        started = time.perf_counter()
        if query.order not in _SORTABLE:
            raise DataError(f"unknown column {query.order!r}: order by one of {', '.join(_SORTABLE)}")
        with self._lock:
            table = self._light(query)
        condition = _condition(query)
        if condition is not None:
            table = table.filter(condition)
        table = table.sort_by(_sort_keys(query))
        rows = table.slice(query.offset, query.limit).to_pylist()
        return {"total": table.num_rows, "rows": rows, "seconds": time.perf_counter() - started}

    def warm(self) -> None:
        """Read the light columns of all files, so that the first search is as fast as the next ones."""
        for rollout_id in self._recorded("rollout"):
            with self._lock:
                self._light(SampleQuery(rollout=rollout_id))

    def sample(self, kind: Kind, rollout_id: int, position: int) -> dict[str, Any]:
        """One sample with everything per token.

        Raises:
            DataError: it is not recorded.
        """
        path = record_file(self.run, kind, rollout_id)
        row = _row_at(path, position)
        if row is None:
            raise DataError(f"{self.run}: sample {position} of {kind} {rollout_id} is not recorded")
        trained = _trained_row(self.run, rollout_id, row) if kind == "rollout" else {}
        num_prompt = len(row["tokens"]) - row["response_length"]
        texts = self._texts.of(row["tokens"])
        mask = row["loss_mask"] if row["loss_mask"] is not None else [1] * row["response_length"]
        per_token = {"rollout_log_probs": row["rollout_log_probs"]} | {
            name: trained.get(name) for name in TRAINER_VALUES
        }
        return {
            "kind": kind,
            "rollout": rollout_id,
            **{name: row[name] for name in LIGHT if name != "snippet"},
            "train_reward": trained.get("train_reward"),
            "prompt": json.loads(row["prompt"]),
            "response": row["response"],
            "rest": json.loads(row["rest"]),
            "ids": row["tokens"],
            "texts": texts,
            "num_prompt": num_prompt,
            "loss_mask": mask,
            "versions": _version_per_token(mask, row["weight_versions"] or []),
            "columns": {name: values for name, values in per_token.items() if values is not None},
            "spans": list(_spans(json.loads(row["trace"]))) if row["trace"] else [],
            "group": self._group(kind, rollout_id, row["group_index"]),
        }

    def _group(self, kind: Kind, rollout_id: int, group: int | None) -> list[dict[str, Any]]:
        if group is None:
            return []
        rows = self.samples(SampleQuery(kind, rollout_id, group=group, limit=256))["rows"]
        return [{name: row[name] for name in ("position", "reward", "response_length", "status")} for row in rows]

    def _recorded(self, kind: Kind) -> list[int]:
        names = (_NAME.match(path.name) for path in (self.run / FOLDER).glob(f"{kind}_*.parquet"))
        return sorted(int(name.group(2)) for name in names if name)

    def _light(self, query: SampleQuery) -> pa.Table:
        numbers = self._recorded(query.kind) if query.rollout is None else [query.rollout]
        tables = [self._table(query.kind, number) for number in numbers]
        present = [table for table in tables if table is not None]
        return pa.concat_tables(present) if present else _empty()

    def _table(self, kind: Kind, rollout_id: int) -> pa.Table | None:
        path = record_file(self.run, kind, rollout_id)
        try:
            changed = path.stat().st_mtime_ns
        except FileNotFoundError:
            return None
        known = self._tables.get(path)
        # A resumed run replaces files.
        if known is None or known[0] != changed:
            known = (changed, _read_light(path, rollout_id))
            self._tables[path] = known
        return known[1]


def _read_light(path: Path, rollout_id: int) -> pa.Table | None:
    """None for a file that is incomplete, or from another version of slime."""
    try:
        table = pq.read_table(path, columns=list(LIGHT))
    except (OSError, pa.ArrowException) as error:
        logger.warning("%s cannot be read, its samples are not shown: %s", path, error)
        return None
    return table.add_column(0, "rollout", pa.array([rollout_id] * table.num_rows, pa.int32()))


def _empty() -> pa.Table:
    schema = pa.schema([(name, pa.string() if name in ("status", "snippet") else pa.float64()) for name in _SORTABLE])
    return schema.empty_table()


def _sort_keys(query: SampleQuery) -> list[tuple[str, str]]:
    # Without ties in a fixed order, pages of the table would overlap.
    ties = [(name, "ascending") for name in ("rollout", "position") if name != query.order]
    return [(query.order, "descending" if query.descending else "ascending"), *ties]


def _condition(query: SampleQuery) -> Any:
    reward, length = pc.field("reward"), pc.field("response_length")
    tests: list[tuple[Any, Callable[[Any], Any]]] = [
        (query.status, lambda value: pc.field("status") == value),
        (query.group, lambda value: pc.field("group_index") == value),
        (query.min_reward, lambda value: reward >= value),
        (query.max_reward, lambda value: reward <= value),
        (query.min_length, lambda value: length >= value),
        (query.max_length, lambda value: length <= value),
        (query.text, lambda value: pc.match_substring(pc.field("snippet"), value, ignore_case=True)),
    ]
    wanted = [test(value) for value, test in tests if value is not None]
    return functools.reduce(operator.and_, wanted) if wanted else None


def _row_at(path: Path, position: int) -> dict[str, Any] | None:
    try:
        rows: list[dict[str, Any]] = pq.read_table(path, filters=[("position", "=", position)]).to_pylist()
    except FileNotFoundError:
        return None
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    return rows[0] if rows else None


def _trained_row(run: Path, rollout_id: int, row: dict[str, Any]) -> dict[str, Any]:
    """The trainer's columns of the sample; empty before it is trained on."""
    for path in train_files(run, rollout_id):
        found = _row_at(path, row["position"])
        # After a restart the position may belong to another sample.
        if found is not None and found["sample_index"] == row["index"]:
            return found
    return {}


def _version_per_token(mask: list[int], versions: list[str]) -> list[str | None]:
    """The weight version of each token: one per stretch of trained tokens, None if the numbers do not match."""
    if len(set(versions)) <= 1:
        return [versions[0] if versions and kept else None for kept in mask]
    stretches = [(bool(kept), len(list(run))) for kept, run in itertools.groupby(mask)]
    if sum(kept for kept, _ in stretches) != len(versions):
        return [None] * len(mask)
    rest = iter(versions)
    return [version for kept, length in stretches for version in [next(rest) if kept else None] * length]


def _spans(trace: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Name, start and end in seconds from the first event, and depth."""
    events = trace["events"]
    if not events:
        return
    first = min(event["ts"] for event in events)
    last = max(event["ts"] for event in events)
    ends = {event["span_id"]: event for event in events if event["type"] == "span_end"}
    depth: dict[str, int] = {}
    for event in events:
        if event["type"] != "span_start":
            continue
        parent = event.get("parent_span_id")
        depth[event["span_id"]] = depth.get(parent, -1) + 1
        end = ends.get(event["span_id"])
        yield {
            "name": event["name"],
            "start": event["ts"] - first,
            "end": (end["ts"] if end else last) - first,
            "is_open": end is None,
            "depth": depth[event["span_id"]],
            "attrs": event.get("attrs", {}) | (end.get("attrs", {}) if end else {}),
        }


# Points per curve that the page receives.
_MOST_POINTS = 600


class MetricFile:
    """The curves of a run from ``metrics.jsonl``. Reads appended lines only. Not thread-safe: needs a lock."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._points: dict[str, dict[float, float]] = {}
        self._axes: dict[str, str] = {}
        self._entries: dict[str, MetricEntry | None] = {}
        self.last_time: float | None = None

    @property
    def size(self) -> int:
        """Bytes of the file. A change means new lines."""
        try:
            return self._path.stat().st_size
        except FileNotFoundError:
            return 0

    def refresh(self) -> None:
        """Read appended lines. An incomplete line is read the next time."""
        if self.size < self._offset:  # the file was replaced
            self.__init__(self._path)  # type: ignore[misc]
        if self.size == self._offset:
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            block = file.read()
        complete = block[: block.rfind(b"\n") + 1]
        self._offset += len(complete)
        for line in complete.splitlines():
            try:
                self._add(json.loads(line))
            except (ValueError, TypeError, KeyError):
                continue  # a line that was cut by a crash

    def _add(self, record: dict[str, Any]) -> None:
        axis = record["step_key"]
        step = float(record[axis])
        self.last_time = record.get("time", self.last_time)
        for name, value in record.items():
            if name in ("time", "step_key", axis) or not isinstance(value, int | float):
                continue
            if name not in self._axes:
                self._entries[name] = describe(name)
            self._axes[name] = axis
            self._points.setdefault(name, {})[step] = float(value)  # a resumed run repeats steps: the last value counts

    def series(self) -> dict[str, dict[str, Any]]:
        """``{name: {"axis": "train/step", "x": [...], "y": [...], "unit", "meaning"}}``, some hundred points each.

        Unit and meaning come from the table of metrics. Both are empty for metrics of the user.
        """
        found = {}
        for name, points in sorted(self._points.items()):
            steps = sorted(points)
            x, y = thin(steps, [points[step] for step in steps])
            entry = self._entries[name]
            texts = {"unit": entry.unit, "meaning": entry.meaning} if entry else {"unit": "", "meaning": ""}
            found[name] = {"axis": self._axes[name], "x": x, "y": y, **texts}
        return found


def thin(x: list[float], y: list[float], limit: int = _MOST_POINTS) -> tuple[list[float], list[float]]:
    """Keep the lowest and the highest point of each of ``limit / 2`` stretches, so that peaks stay visible."""
    if len(x) <= limit:
        return x, y
    kept: list[int] = []
    stretches = limit // 2
    for stretch in range(stretches):
        places = range(stretch * len(x) // stretches, (stretch + 1) * len(x) // stretches)
        kept += sorted({min(places, key=y.__getitem__), max(places, key=y.__getitem__)})
    return [x[place] for place in kept], [y[place] for place in kept]


# Texts of tokens need only the tokenizer's file: importing transformers takes seconds.


# Decoders return it for an incomplete character.
_HALF = "\ufffd"


class TokenTexts:
    """Texts of token ids. A ``checkpoint`` folder without ``tokenizer.json`` shows ids instead."""

    def __init__(self, checkpoint: str | None) -> None:
        self._checkpoint = checkpoint

    @cached_property
    def _tokenizer(self) -> Any:
        path = Path(self._checkpoint or "") / "tokenizer.json"
        try:
            from tokenizers import Tokenizer

            return Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            logger.warning("%s cannot be read, tokens are shown as numbers: %s", path, error)
            return None

    def of(self, ids: Sequence[int]) -> list[str]:
        """One text per token. A character of several tokens is at the last of them."""
        if self._tokenizer is None:
            return [f"{token} " for token in ids]
        texts: list[str] = []
        pending: list[int] = []
        for token in ids:
            pending.append(token)
            text = self._tokenizer.decode(pending, skip_special_tokens=False)
            # A character has at most four bytes, and each token has at least one.
            if text.endswith(_HALF) and len(pending) < 4:
                texts.append("")
                continue
            # decoding a single token may strip its leading blank
            texts.append(self._with_blanks(token) if len(pending) == 1 else text)
            pending = []
        if pending:
            texts[-1] = self._tokenizer.decode(pending, skip_special_tokens=False)
        return texts

    def _with_blanks(self, token: int) -> str:
        text: str = self._tokenizer.decode([token], skip_special_tokens=False)
        # SentencePiece marks a leading blank with U+2581, and decoding removes it.
        piece = self._tokenizer.id_to_token(token) or ""
        return " " + text if piece.startswith("\u2581") and not text.startswith(" ") else text
