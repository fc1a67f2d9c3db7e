"""Exports of ``--save-hf`` on the Hugging Face Hub (``--push-to-hub``), with a model card that describes the run.

    export ──▶ hf upload REPO <export> .                  weights, config and tokenizer
               hf upload REPO <run>/model_card.md README.md

The commands of huggingface_hub run as processes, one export after the other, while the run goes on. They read the token
and the address of the Hub from the environment, or from ``hf auth login``. A failed push is a warning with commands.
"""

from __future__ import annotations

import functools
import json
import logging
import re
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import psutil

from slime.models.lora import CONFIG_FILE
from slime.observability.run_info import RunInfo, read_run_info
from slime.utils.errors import SlimeError
from slime.utils.files import replacing

logger = logging.getLogger(__name__)

CARD = "model_card.md"
_PROGRAM = "huggingface_hub.cli.hf"
_STALL_S = 1800.0  # buffers of half a GB may wait for a slow network without being read
_LOOK_EVERY_S = 0.2
_ROWS = 20
_TAIL_BYTES, _TAIL_LINES = 2000, 4
_COLOR = re.compile(r"\x1b\[[0-9;]*m")


class PushError(SlimeError):
    """A command of the push failed, or made no progress."""


class HubPushes:
    """The pushes of a run. Without ``repo`` nothing happens.

    Args:
        repo: ``owner/name``. A new repository is private.
        stall_s: a command that reads and writes nothing for so long is ended.
    """

    def __init__(self, repo: str | None, stall_s: float = _STALL_S) -> None:
        self._repo, self._stall_s = repo, stall_s
        self._thread = ThreadPoolExecutor(1, "hub-push")
        self._pushes: dict[str, Future[None]] = {}
        self._stopped = threading.Event()

    def begin(self, path: str, rollout_id: int, run: Path | None) -> None:
        """Push the export ``path`` after those before it. ``run``: folder of the run, which gets the card."""
        if self._repo is not None:
            assert run is not None, "the tracker of a driver has a folder"
            push = self._pushes[path] = self._thread.submit(self._push, self._repo, path, rollout_id, run)
            push.add_done_callback(functools.partial(_warn_of_defect, path))

    def wait_for(self, path: str) -> None:
        """Wait for the push of ``path``, whose files are about to be replaced."""
        if path in self._pushes:
            wait([self._pushes.pop(path)])

    def close(self, *, stops: bool) -> None:
        """Wait for all pushes. ``stops``: end them instead."""
        if stops:
            self._stopped.set()
        elif waiting := [path for path, push in self._pushes.items() if not push.done()]:
            logger.info("waiting for the push of %s to %s", ", ".join(waiting), self._repo)
        self._thread.shutdown()

    def _push(self, repo: str, path: str, rollout_id: int, run: Path) -> None:
        about = ["--commit-message", f"rollout {rollout_id}"]
        # The card replaces a file of the base model. It is uploaded last: then the weights are complete.
        weights = [repo, path, ".", "--private", "--exclude", "README.md", *about]
        card = [repo, str(run / CARD), "README.md", "--private", *about]
        try:
            self._run(weights)
            with replacing(run / CARD) as partial:
                partial.write_text(model_card(run, path, rollout_id), encoding="utf-8")
            self._run(card)
            logger.info("pushed %s to %s", path, repo)
        except (SlimeError, OSError, ValueError, psutil.Error) as error:  # training goes on
            commands = " && ".join(shlex.join(["hf", "upload", *words]) for words in (weights, card))
            logger.warning("%s was not pushed to %s: %s. To try again: %s", path, repo, error, commands)

    def _run(self, words: Sequence[str]) -> None:
        """Run ``hf upload`` as long as it makes progress."""
        # A file: a full pipe would stop the process, and progress bars write much.
        with tempfile.TemporaryFile() as output:
            self._raise_if_stopped()
            # A separate session: Ctrl-C in the terminal ends the run, which then ends this process.
            process = psutil.Popen(
                [sys.executable, "-m", _PROGRAM, "upload", *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                self._watch(process)
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
            if process.returncode != 0:
                output.seek(max(0, output.seek(0, 2) - _TAIL_BYTES))
                text = _COLOR.sub("", output.read().decode(errors="replace"))
                lines = [line for line in text.splitlines() if line and not line.startswith("Hint:")]
                raise PushError(f"hf upload ended with {process.returncode}: {' '.join(lines[-_TAIL_LINES:])}")

    def _watch(self, process: psutil.Popen) -> None:
        seen, since = None, time.monotonic()
        while process.poll() is None:
            self._raise_if_stopped()
            if (found := _activity(process)) != seen:
                seen, since = found, time.monotonic()
            elif time.monotonic() - since > self._stall_s:
                raise PushError(f"hf upload has read and written nothing for {self._stall_s:g} s")
            self._stopped.wait(_LOOK_EVERY_S)

    def _raise_if_stopped(self) -> None:
        if self._stopped.is_set():
            raise PushError("the run ended before")


def _warn_of_defect(path: str, push: Future[None]) -> None:
    if (error := push.exception()) is not None:
        logger.warning("%s was not pushed: %r", path, error, exc_info=error)


def _activity(process: psutil.Popen) -> Any:
    """Grows while files are read and data are sent."""
    try:
        counted = process.io_counters()
        return counted.read_chars, counted.write_chars
    except psutil.Error:  # it has just ended
        return None


def model_card(run: Path, path: str, rollout_id: int) -> str:
    """README.md of the repository, from ``run.json`` and the metrics of the run.

    Raises:
        DataError: ``run`` is not the folder of a run.
    """
    info = read_run_info(run)
    is_adapter = (Path(path) / CONFIG_FILE).is_file()
    settings = info.settings
    facts = {
        "base model": Path(info.hf_checkpoint or "unknown").name,
        "rollouts trained": rollout_id + 1,
        "prompts": settings.get("prompt_data"),
        "advantages": settings.get("advantage_estimator"),
        "weights": "adapter (LoRA)" if is_adapter else "whole model",
        "slime": " ".join(filter(None, (info.versions.get("slime"), info.commit))),
    }
    # Without base_model: the Hub refuses values that are no names of its repositories, such as paths.
    head = ["---", f"library_name: {'peft' if is_adapter else 'transformers'}", "tags:", "- reinforcement-learning"]
    return "\n".join(
        [
            *(*head, "- slime", "---", "", f"# {settings.get('experiment_name') or run.name}", ""),
            *("| | |", "|---|---|", *(f"| {name} | {_cell(value)} |" for name, value in facts.items() if value), ""),
            *("## Command", "", "```bash", _command(info), "```", ""),
            *_curve(run / "metrics.jsonl"),
        ]
    )


def _command(info: RunInfo) -> str:
    flags = shlex.join(info.argv).replace(" --", " \\\n    --")
    return f"python {info.driver} {flags}"


def _cell(value: Any) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")


def _curve(metrics: Path) -> Iterator[str]:
    """Rewards of rollouts and evaluations as a table of at most ``_ROWS`` rows, the last one among them."""
    rows: dict[int, dict[str, float]] = {}
    for line in metrics.read_text(encoding="utf-8").splitlines() if metrics.is_file() else ():
        record = json.loads(line) if line.endswith("}") else {}  # a crash may cut the last line
        step = record.get(record.get("step_key"))
        if step is not None and record["step_key"] != "train/step":
            shown = {name: value for name, value in record.items() if _is_reward(name)}
            rows.setdefault(int(step), {}).update(shown)
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    known = [step for step in sorted(rows) if rows[step]]
    if not known:
        return
    every = -(-len(known) // _ROWS)
    yield from ("## Rewards", "", f"| rollout | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|")
    # Backwards, so that the last row is among them.
    for step in known[::-1][::every][::-1]:
        values = (f"{rows[step][name]:.3f}" if name in rows[step] else "" for name in names)
        yield f"| {step} | {' | '.join(values)} |"


def _is_reward(name: str) -> bool:
    end = name.removeprefix("eval/")
    is_set = end != name and not any(part in end for part in ("/", "-truncated_ratio", "-pass@"))
    return name == "rollout/raw_reward" or (is_set and end not in ("step", "weight_version"))
