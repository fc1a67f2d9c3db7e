"""The data of the board, from the files in a run's folder. Called by ``server``.

The table of samples is a query over the light columns of all sample files, which stay in memory once they are read; one
sample is read whole only when the page shows it. Texts of samples can be searched, and split into tokens.
"""

from __future__ import annotations

import dataclasses
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
from typing import Any, Literal, get_args

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from slime.board.curves import Axis, MetricFile
from slime.data.columns import TRAINER_VALUES
from slime.observability.run_info import FILE, RunInfo, read_run_info
from slime.observability.sample_record import FOLDER, LIGHT, record_file, train_files
from slime.utils.errors import DataError, reported

logger = logging.getLogger(__name__)

Kind = Literal["rollout", "eval"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_NAME = re.compile(r"^(rollout|eval)_(\d+)\.parquet$")
# Of a group, reward and lengths are means.
_SORTABLE = ("rollout", *LIGHT, "spread")
_PROMPT_CHARS = 200


@dataclass(frozen=True)
class SampleQuery:
    """A selection of rows. None means no condition.

    Attributes:
        rollout: its number.
        text: part of the prompt, the response or the label, in any case.
        by_group: rows are groups instead of samples.
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
    by_group: bool = False
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
        self._written = _changed(run / FILE)
        self.info: RunInfo = read_run_info(run)
        self._metrics = MetricFile(run / "metrics.jsonl", self.info.started)
        self._tables: dict[Path, tuple[int, pa.Table | None]] = {}
        self._texts = TokenTexts(self.info.resolved(self.info.hf_checkpoint))
        self._lock = threading.Lock()

    def is_current(self) -> bool:
        """False after the run was started again in this folder."""
        return _changed(self.run / FILE) == self._written

    def version(self) -> str:
        """Another text after each change of curves or samples."""
        return f"{self._metrics.size}-{_changed(self.run / FOLDER)}"

    def overview(self) -> dict[str, Any]:
        """Command, machine, settings, and the numbers of recorded rollouts."""
        info = dataclasses.asdict(self.info)
        return {**info, "folder": str(self.run)} | {kind: self._recorded(kind) for kind in ("rollout", "eval")}

    def metrics(self, axis: Axis) -> dict[str, Any]:
        """All curves."""
        with self._lock:
            self._metrics.refresh()
            return self._metrics.series(axis)

    def metric_rows(self, names: Sequence[str]) -> list[tuple[Any, ...]]:
        """Every point of some metrics, without names of all metrics."""
        with self._lock:
            self._metrics.refresh()
            return list(self._metrics.rows(names))

    def samples(self, query: SampleQuery) -> dict[str, Any]:
        """Rows of the table, and their total number. With ``query.by_group`` a row is a group."""
        started = time.perf_counter()
        with self._lock:
            table = self._light(query)
        condition = _condition(query)
        if condition is not None:
            table = table.filter(condition)
        if query.text is not None:
            table = table.filter(self._contains(query.kind, query.text, table["rollout"], table["position"]))
        table = _groups(table) if query.by_group else table
        sortable = [name for name in table.column_names if name in _SORTABLE]
        if query.order not in sortable:
            raise DataError(f"unknown column {query.order!r}: order by one of {', '.join(sortable)}")
        table = table.sort_by(_sort_keys(query))
        rows = table.slice(query.offset, query.limit).to_pylist()
        self._add_texts(query.kind, rows)
        return {"total": table.num_rows, "rows": rows, "seconds": time.perf_counter() - started}

    def _contains(self, kind: Kind, text: str, rollouts: pa.ChunkedArray, positions: pa.ChunkedArray) -> pa.Array:
        """Whether prompt, response or label of each sample has ``text``, in any case."""
        paths = {number: record_file(self.run, kind, number) for number in rollouts.unique().to_pylist()}
        found = {number: positions_with(path, _changed(path), text) for number, path in paths.items()}
        pairs = zip(rollouts.to_pylist(), positions.to_pylist(), strict=True)
        return pa.array([position in found[number] for number, position in pairs], pa.bool_())

    def _add_texts(self, kind: Kind, rows: list[dict[str, Any]]) -> None:
        """Add prompt and label, which are read only for the rows that the page shows."""
        for number in {row["rollout"] for row in rows}:
            members = {row["position"]: row for row in rows if row["rollout"] == number}
            wanted = [("position", "in", list(members))]
            columns = ["position", "prompt", "rest"]
            for found in pq.read_table(
                record_file(self.run, kind, number), columns=columns, filters=wanted
            ).to_pylist():
                label = json.loads(found["rest"]).get("label")
                members[found["position"]] |= {"prompt": prompt_text(found["prompt"]), "label": label}
        for row, text in zip(rows, without_common([row.get("prompt", "") for row in rows]), strict=True):
            row["prompt"] = text[:_PROMPT_CHARS]

    def warm(self) -> None:
        """Read the light columns of all files, so that the first search is as fast as the next ones."""
        for rollout_id in self._recorded("rollout"):
            with self._lock:
                self._table("rollout", rollout_id)

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
        changed = _changed(path)
        if not changed:
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
    schema = pa.schema(
        [(name, pa.string() if name in ("status", "snippet") else pa.float64()) for name in ("rollout", *LIGHT)]
    )
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
    ]
    wanted = [test(value) for value, test in tests if value is not None]
    return functools.reduce(operator.and_, wanted) if wanted else None


def _groups(table: pa.Table) -> pa.Table:
    """One row per group: rewards of its samples in their order, mean and spread of the rewards, mean lengths."""
    sums: list[tuple[str, str]] = [
        *(("position", how) for how in ("min", "list")),
        *(("reward", how) for how in ("list", "mean", "stddev")),
        *((name, "mean") for name in ("prompt_tokens", "response_length", "trained_tokens", "seconds")),
    ]
    # One thread: only then the lists keep the order of the samples.
    groups = table.group_by(["rollout", "group_index"], use_threads=False).aggregate(sums)
    renamed = {"position_min": "position", "position_list": "positions", "reward_list": "rewards"}
    renamed |= {"reward_stddev": "spread"}
    return groups.rename_columns([renamed.get(name, name.removesuffix("_mean")) for name in groups.column_names])


def _changed(path: Path) -> int:
    """Time of the last change. 0 for a path that does not exist."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


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


@functools.lru_cache(maxsize=4096)
def positions_with(path: Path, changed: int, text: str) -> frozenset[int]:
    """Samples of a file whose prompt, response or label has ``text``. ``changed``: time of the file's last change."""
    try:
        table = pq.read_table(path, columns=["position", "prompt", "response", "rest"])
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    escaped = json.dumps(text)[1:-1]  # prompt and label are JSON
    has = functools.partial(pc.match_substring, ignore_case=True)
    in_text = pc.or_(has(table["response"], text), has(table["prompt"], escaped))
    found = set(table["position"].filter(in_text).to_pylist())
    # The label is one of several fields of this column.
    candidates = table.filter(has(table["rest"], escaped)).select(["position", "rest"]).to_pylist()
    labels = {row["position"]: json.loads(row["rest"]).get("label") or "" for row in candidates}
    found |= {position for position, label in labels.items() if text.lower() in str(label).lower()}
    return frozenset(found)


def prompt_text(stored: str) -> str:
    """Text or messages of a recorded prompt as one text."""
    prompt = json.loads(stored)
    if not isinstance(prompt, list):
        return str(prompt)
    return "\n".join(str(message.get("content")) if isinstance(message, dict) else str(message) for message in prompt)


def without_common(texts: list[str]) -> list[str]:
    """The parts in which prompts differ: without the words that all of them begin and end with."""
    different = set(texts)
    if len(different) < 2:
        return texts
    prefix, suffix = _common(different), _common({text[::-1] for text in different})[::-1]
    # Whole words and special tokens only: 12+34 and 17+20 begin with the same digit.
    start = max((place.end() for place in re.finditer(r"[\s>]", prefix)), default=0)
    first = re.search(r"[\s<]", suffix)
    end = len(suffix) - first.start() if first else 0
    return [text[start : max(start, len(text) - end)] for text in texts]


def _common(texts: set[str]) -> str:
    """The longest common beginning."""
    # If the first and the last in their order share it, all others do.
    pairs = zip(min(texts), max(texts), strict=False)
    return "".join(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


# Decoders return it for an incomplete character.
_HALF = "\ufffd"


class TokenTexts:
    """Texts of token ids, from the tokenizer's file: importing transformers takes seconds.

    A ``checkpoint`` folder without ``tokenizer.json`` shows ids instead."""

    def __init__(self, checkpoint: str | None) -> None:
        self._checkpoint = checkpoint

    @cached_property
    def _tokenizer(self) -> Any:
        path = Path(self._checkpoint or "") / "tokenizer.json"
        with reported(lambda error: logger.warning("%s cannot be read, tokens are shown as numbers: %s", path, error)):
            from tokenizers import Tokenizer

            return Tokenizer.from_file(str(path))
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
