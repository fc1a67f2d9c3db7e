"""Samples of each rollout in the run's folder, readable while the run goes on.

    <run>/samples/rollout_000003.parquet      the first --record-samples samples, as generated and scored
    <run>/samples/eval_000003.parquet         the same of an evaluation
    <run>/samples/train_000003_dp1.parquet    the columns of the trainer: log-probs, advantages, ... per token

Rows of both kinds with the same ``position`` (the place of the sample in its rollout) belong together. The rollout
manager writes the first kind, one rank of each data-parallel rank the other. Read by the board, the replay and the
doctor. A file appears complete or not at all. A record that cannot be written does not end the run.
"""

from __future__ import annotations

import atexit
import copy
import functools
import json
import logging
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from slime.data.columns import TRAINER_VALUES
from slime.data.sample import Sample
from slime.utils.errors import reported
from slime.utils.files import replacing

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)

FOLDER = "samples"
"""Below the run's folder."""

_LIGHT_TYPES = {
    "position": "int32",
    "index": "int64",
    "group_index": "int64",
    "status": "string",
    "reward": "float64",
    "prompt_tokens": "int32",
    "response_length": "int32",
    "trained_tokens": "int32",
    "weight_version": "string",
    "seconds": "float64",
    "snippet": "string",
}
LIGHT = tuple(_LIGHT_TYPES)
"""Columns of the table of samples, cheap to read for all samples."""

_SNIPPET_CHARS = 120
_ARRAYS = ("tokens", "loss_mask", "rollout_log_probs", "weight_versions")
_TEXTS = ("response", "prompt", "trace")
# Columns with few distinct values. For the others, building a dictionary costs more than it saves.
_REPEATED = ("status", "weight_version", "prompt", "advantages.list.element", "returns.list.element")
_JSON = json.JSONEncoder(skipkeys=True, default=lambda item: f"<{type(item).__name__}>")


def record_file(run: Path, kind: Literal["rollout", "eval"], rollout_id: int) -> Path:
    return run / FOLDER / f"{kind}_{rollout_id:06d}.parquet"


def train_files(run: Path, rollout_id: int) -> list[Path]:
    """The files of all data-parallel ranks. None before the rollout was trained on."""
    return sorted((run / FOLDER).glob(f"train_{rollout_id:06d}_dp*.parquet"))


def record_rollout(
    run: Path,
    samples: Iterable[Sample],
    *,
    rollout_id: int,
    limit: int,
    reward_key: str | None,
    kind: Literal["rollout", "eval"] = "rollout",
    writer: BackgroundWriter | None = None,
) -> None:
    """Write the first ``limit`` samples in their current state. Nothing for 0.

    Args:
        reward_key: entry of a dict of rewards.
        writer: encodes and writes the file in its thread. None: the file is written before this returns.
    """
    if limit > 0:
        path = record_file(run, kind, rollout_id)
        with _excused(path):
            # Not in every rollout: the folder has the files of all of them, so its list grows.
            if kind == "rollout" and path.exists():
                _forget_training(run, rollout_id)
            rows = [_row(position, sample, reward_key) for position, sample in enumerate(islice(samples, limit))]
            if writer is None:
                _write(path, rows, _rollout_schema())
            else:
                writer.submit(functools.partial(_write_excused, path, rows))


def record_training(
    run: Path, columns: Mapping[str, Any], *, rollout_id: int, limit: int, data_parallel_rank: int
) -> None:
    """Write this data-parallel rank's columns for its samples among the first ``limit``.

    Args:
        columns: the rank's columns (``slime.data.columns``) with whole responses.
    """
    path = run / FOLDER / f"train_{rollout_id:06d}_dp{data_parallel_rank}.parquet"
    with _excused(path):
        positions = [int(position) for position in columns["partition"]]
        names = [name for name in TRAINER_VALUES if columns.get(name) is not None]
        rows = [
            {
                "position": position,
                "sample_index": columns["sample_indices"][place],
                "train_reward": float(columns["rewards"][place]),
                # float(): numpy has no bfloat16.
                **{name: columns[name][place].detach().float().cpu().numpy() for name in names},
            }
            for place, position in enumerate(positions)
            if position < limit
        ]
        if rows:
            _write(path, rows, _train_schema())


def read_rows(path: Path, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Rows of a file. ``columns`` None for all of them."""
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = pq.read_table(path, columns=None if columns is None else list(columns)).to_pylist()
    return rows


def sample_of_row(row: Mapping[str, Any]) -> Sample:
    """The sample of a row, without fields that JSON cannot hold."""
    fields = json.loads(row["rest"]) | {name: row[name] for name in ("index", "group_index", "status", *_ARRAYS)}
    fields |= {"response": row["response"], "response_length": row["response_length"]}
    fields["prompt"] = json.loads(row["prompt"])
    if row["trace"]:
        fields["trace"] = json.loads(row["trace"])
    return Sample.from_dict(fields)


def _excused(path: Path) -> AbstractContextManager[None]:
    """Log errors instead of raising them: samples hold arbitrary objects of users' functions, and disks fill up."""
    return reported(lambda error: logger.warning("%s was not written, the run goes on without it: %s", path, error))


def _write_excused(path: Path, rows: list[dict[str, Any]]) -> None:
    with _excused(path):
        _write(path, rows, _rollout_schema())


def _forget_training(run: Path, rollout_id: int) -> None:
    """Delete the trainer's files of a rollout that is generated again."""
    # after a restart, its samples may go to other data-parallel ranks than before
    for path in train_files(run, rollout_id):
        path.unlink(missing_ok=True)


def _row(position: int, sample: Sample, reward_key: str | None) -> dict[str, Any]:
    fields = sample.to_dict()
    # These have columns. All other fields go into ``rest``.
    own = {"index", "group_index", "status", "response_length", *_ARRAYS, *_TEXTS}
    rest = {name: value for name, value in fields.items() if name not in own and _is_kept(value)}
    trace = fields.get("trace")
    return {
        "position": position,
        "index": sample.index if isinstance(sample.index, int) else None,
        "group_index": sample.group_index if isinstance(sample.group_index, int) else None,
        "status": sample.status.value,
        "reward": _number(sample, reward_key),
        "prompt_tokens": max(0, len(sample.tokens) - sample.response_length),
        "response_length": sample.response_length,
        "trained_tokens": 0 if sample.remove_sample else sample.effective_response_length,
        "weight_version": " ".join(dict.fromkeys(map(str, sample.weight_versions))),
        "seconds": _seconds(trace),
        "snippet": _utf8(sample.response[:_SNIPPET_CHARS]),
        "prompt": _json(sample.prompt),
        "response": _utf8(sample.response),
        "trace": _json(trace) if trace else None,
        "rest": _json(rest),
        **{name: copy.copy(fields[name]) for name in _ARRAYS},  # copied: a user's function may change them later
    }


def _is_kept(value: Any) -> bool:
    """False for tensors, arrays and media: they are large, and --save-debug-rollout-data has them."""
    return value is None or isinstance(value, str | int | float | dict | list | tuple)


def _json(value: Any) -> str:
    # escapes keep text that is not valid UTF-8, such as half of a surrogate pair; keys that JSON lacks are dropped
    return _JSON.encode(value)


def _utf8(text: str) -> str:
    # A text column must be valid UTF-8, and a response may hold half of a surrogate pair.
    return text.encode("utf-8", "replace").decode("utf-8")


def _number(sample: Sample, reward_key: str | None) -> float | None:
    reward = sample.reward
    if isinstance(reward, dict):
        reward = reward.get(reward_key)
    return float(reward) if isinstance(reward, int | float) else None


def _seconds(trace: Any) -> float | None:
    """Seconds from the first to the last event of the trace."""
    times = [event["ts"] for event in trace["events"]] if isinstance(trace, dict) else []
    return max(times) - min(times) if times else None


def _rollout_schema() -> pa.Schema:
    import pyarrow as pa

    return pa.schema(
        [
            *((name, pa.type_for_alias(kind)) for name, kind in _LIGHT_TYPES.items()),
            ("prompt", pa.string()),
            ("response", pa.string()),
            ("tokens", pa.list_(pa.int32())),
            ("loss_mask", pa.list_(pa.int8())),
            ("rollout_log_probs", pa.list_(pa.float32())),
            ("weight_versions", pa.list_(pa.string())),
            ("trace", pa.string()),
            ("rest", pa.string()),
        ]
    )


def _train_schema() -> pa.Schema:
    import pyarrow as pa

    fixed = [("position", pa.int32()), ("sample_index", pa.int64()), ("train_reward", pa.float64())]
    return pa.schema([*fixed, *((name, pa.list_(pa.float32())) for name in TRAINER_VALUES)])


def _write(path: Path, rows: list[dict[str, Any]], schema: pa.Schema) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = [pa.array([row.get(item.name) for row in rows], item.type) for item in schema]
    table = pa.Table.from_arrays(columns, schema=schema)
    # statistics help to skip row groups, and there is one
    options = {"compression": "zstd", "use_dictionary": list(_REPEATED), "write_statistics": False}
    with replacing(path) as partial:
        pq.write_table(table, partial, **options)


# Length of the queue: rollouts that the disk may lag before the run waits for it.
_ROOM = 8
_ROOM_TIMEOUT_S = 60.0
# A disk that hangs must not delay the exit for longer.
_EXIT_TIMEOUT_S = 10.0


class BackgroundWriter:
    """A thread that runs jobs in order, started by the first job.

    The caller waits while the queue is full, up to a deadline. Errors of a job are logged. All jobs are done before the
    process exits, also after SIGTERM. SIGKILL loses the jobs in the queue.
    """

    def __init__(self, room: int = _ROOM) -> None:
        self._jobs: queue.Queue[Callable[[], object]] = queue.Queue(room)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], object], timeout_s: float = _ROOM_TIMEOUT_S) -> None:
        """Queue ``job``.

        Raises:
            TimeoutError: the queue was full for ``timeout_s`` seconds.
        """
        self._start()
        try:
            self._jobs.put(job, timeout=timeout_s)
        except queue.Full:
            raise TimeoutError(f"{self._jobs.maxsize} files have waited for the disk for {timeout_s:g} s") from None

    def flush(self, timeout_s: float) -> bool:
        """Wait for all earlier jobs. Returns whether they are done."""
        if self._thread is None:
            return True
        is_done = threading.Event()
        ends = time.monotonic() + timeout_s
        try:
            # A job that runs after all earlier ones.
            self._jobs.put(is_done.set, timeout=timeout_s)
        except queue.Full:
            return False
        return is_done.wait(max(0.0, ends - time.monotonic()))

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                # a daemon, so that a hanging disk cannot keep the process from exiting
                self._thread = threading.Thread(target=self._work, name="background writer", daemon=True)
                self._thread.start()
                atexit.register(self._finish)

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            with reported(lambda _: logger.exception("a file could not be written")):
                job()

    def _finish(self) -> None:
        if not self.flush(_EXIT_TIMEOUT_S):
            logger.warning("files of this process were not written in %g s; the last ones are lost", _EXIT_TIMEOUT_S)


# One sample on the console.

_MOST_TEXT = 400  # characters of a prompt or response that leave its process


@dataclass(frozen=True)
class Example:
    """One sample of a rollout, as text for a person."""

    prompt: str
    response: str
    label: Any
    reward: Any

    @classmethod
    def of(cls, sample: Sample) -> Example:
        label = None if sample.label is None else str(sample.label)[:_MOST_TEXT]
        prompt, response = sample.prompt, sample.response
        if not response and isinstance(prompt, list) and prompt and prompt[-1].get("role") == "assistant":
            prompt, response = prompt[:-1], _question(prompt)  # supervised: the prompt is the whole conversation
        return cls(_question(prompt)[-_MOST_TEXT:], response[:_MOST_TEXT], label, sample.reward)

    def line(self, width: int) -> str:
        """``e.g. prompt -> response  (label ..., reward ...)``. The texts are cut where they are too long."""
        facts = [f"{name} {_short(_flat(value), 24)}" for name, value in self._facts() if value is not None]
        end = f"  ({', '.join(facts)})" if facts else ""
        room = width - len("e.g.  -> ") - len(end)
        response = _short(_flat(self.response), max(room // 2, room - len(self.prompt)))
        prompt = _flat(self.prompt)
        if len(prompt) > (left := room - len(response)):  # the end of a prompt asks the question
            prompt = "…" + prompt[len(prompt) - left + 1 :]
        return f"e.g. {prompt} -> {response}{end}"

    def _facts(self) -> Iterable[tuple[str, Any]]:
        yield "label", self.label
        yield "reward", f"{self.reward:g}" if isinstance(self.reward, int | float) else self.reward


_SPECIAL = re.compile(r"<\|[^|<>]*\|>|</?(?:s|think|bos|eos|pad)>|\[/?INST\]")
_ROLE = re.compile(r"^(system|user|assistant|tool|model)\b")


def _question(prompt: Any) -> str:
    """The last message of a prompt, without the tokens and roles of a chat template."""
    if not isinstance(prompt, str):
        last = prompt[-1] if isinstance(prompt, Sequence) and prompt else prompt
        content = last.get("content") if isinstance(last, Mapping) else last
        parts = content if isinstance(content, Sequence) and not isinstance(content, str) else [content]
        return " ".join(str(part.get("text", "")) if isinstance(part, Mapping) else str(part) for part in parts)
    texts = [_ROLE.sub("", part.strip()).strip() for part in _SPECIAL.split(prompt)]
    return next((text for text in reversed(texts) if text), prompt)


def _flat(value: Any) -> str:
    return " ".join(_SPECIAL.sub("", str(value)).split())


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: max(0, most - 1)] + "…"
