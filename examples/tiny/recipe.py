"""Shared code of the offline runs: a tiny model, generated data, ``train.py`` as a command, its metrics.

Every ``examples/*/run_tiny.py`` and the demo call it. An example with a real model does not need it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

__all__ = [
    "ROOT",
    "ROWS_PER_ROLLOUT",
    "learn",
    "make_model",
    "options",
    "print_first_and_last",
    "read_metrics",
    "run_environment",
    "run_train",
    "series",
    "serve",
    "warm_start",
    "write_rows",
]

# A phase takes about a minute. The limit ends a run that hangs.
PHASE_TIMEOUT_S = 900
_STEPS_PER_ROLLOUT = 50
ROWS_PER_ROLLOUT = 32 * _STEPS_PER_ROLLOUT

SMALL_BATCHES = ("--use-dynamic-batch-size", "--max-tokens-per-gpu", 8192, "--actor-num-gpus-per-node", 1)
ONE_ENGINE = ("--rollout-num-gpus", 1, "--sglang-context-length", 256, "--sglang-max-total-tokens", 32768)
GRPO = (
    *("--label-key", "label", "--rollout-shuffle", "--advantage-estimator", "grpo"),
    *("--rollout-batch-size", 16, "--n-samples-per-prompt", 8, "--rollout-temperature", 1.0),
    *("--lr", "5e-4", "--min-lr", "5e-4", "--adam-beta2", 0.95, "--weight-decay", 0.0, "--clip-grad", 1.0),
    *SMALL_BATCHES,
    *ONE_ENGINE,
)
"""Common flags of the learning runs. :func:`learn` adds model, data and paths, the example its functions."""


def options(doc: str | None, name: str, **choices: tuple[str, ...]) -> argparse.Namespace:
    """Parse ``--output`` and a flag per name in ``choices`` (default: the first value), and empty the directory."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs") / name, help="emptied first")
    for flag, values in choices.items():
        parser.add_argument(f"--{flag.replace('_', '-')}", choices=values, default=values[0])
    parsed = parser.parse_args()
    parsed.output = output = parsed.output.resolve()
    # Only a directory that an example made is emptied: --output may be a mistake.
    marker = output / ".example"
    if output.exists() and any(output.iterdir()) and not marker.exists():
        parser.error(f"--output {output} holds files that are not of this example: name another directory")
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    marker.touch()
    return parsed


def make_model(output: Path, words: Sequence[str]) -> str:
    """A random Qwen3 with 2 layers, one token per character and per word of ``words``. Returns its directory."""
    from tools.make_tiny_task import ModelShape, make_tiny_task

    shape = ModelShape(num_layers=2, ffn_hidden_size=256, init_std=0.1)
    return make_tiny_task(output / "tiny", shape=shape, words=words).model


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def warm_start(
    model: str,
    rows: Iterable[dict[str, Any]],
    output: Path,
    *,
    rollouts: int,
    save_interval: int | None = None,
    flags: Sequence[Any] = (),
) -> str:
    """Supervised training on ``rows``, in their order, by ``train.py``: the model learns the form of an answer.

    Args:
        rows: ``prompt`` (messages) and ``metadata.segments``: ``[text, 1 if the model writes it, else 0]``.
        rollouts: times ``ROWS_PER_ROLLOUT`` rows, in steps of 32.
        save_interval: rollouts between checkpoints. None saves the last.
        flags: further flags of the run.

    Returns:
        The directory of the last Hugging Face checkpoint. That of rollout ``i`` is beside it and ends in ``_i``.
    """
    folder = output / "warm_start"
    command = [
        *("--hf-checkpoint", model, "--prompt-data", write_rows(output / "warm_start.jsonl", rows)),
        # No engines: the responses are given.
        *("--apply-chat-template", "--debug-train-only", "--loss-type", "sft_loss"),
        *("--disable-compute-advantages-and-returns", "--num-rollout", rollouts, "--fp32"),
        *("--rollout-function-path", "examples.tiny.demonstrations.generate_rollout"),
        *("--rollout-batch-size", ROWS_PER_ROLLOUT, "--num-steps-per-rollout", _STEPS_PER_ROLLOUT, *SMALL_BATCHES),
        *("--lr", "2e-3", "--min-lr", "2e-3", "--lr-warmup-iters", 20, "--adam-beta2", 0.95, "--weight-decay", 0.01),
        *("--save", folder / "checkpoints", "--save-interval", save_interval or rollouts),
        *("--save-hf", folder / "hf_{rollout_id}", "--output-dir", output, "--experiment-name", "warm_start", *flags),
    ]
    run_train("supervised warm start", command)
    return str(folder / f"hf_{rollouts - 1}")


def learn(
    title: str,
    model: str,
    data: str,
    flags: Sequence[Any],
    output: Path,
    *,
    rollouts: int,
    script: str = "train.py",
    precision: str = "--fp32",
) -> list[dict[str, Any]]:
    """GRPO from ``model`` on the rows of ``data``: the run that the example is about.

    Args:
        flags: the example's functions and lengths. Of two equal flags the later one counts.

    Returns:
        The records of the run's metrics. Its samples are below ``output/samples``, everything else in ``output/grpo``.
    """
    common = [
        *("--hf-checkpoint", model, "--prompt-data", data, *GRPO, "--num-rollout", rollouts, precision),
        *("--save-debug-rollout-data", output / "samples" / "{rollout_id}.pt"),
        *("--output-dir", output, "--experiment-name", "grpo"),
    ]
    # The example's flags come last, so that they win.
    run_train(title, [*common, *flags], script)
    return read_metrics(output, "grpo")


@contextmanager
def serve(model: str, output: Path) -> Iterator[str]:
    """A second engine outside of any run. Yields the address of its server."""
    from slime.backends.sglang_utils.engine import EngineSpec, SGLangEngine
    from slime.backends.sglang_utils.server_args import build_argv, server_env
    from slime.utils.net import free_port

    port = free_port()
    args = argparse.Namespace(
        hf_checkpoint=model,
        sglang_argv=["--context-length", "256", "--max-total-tokens", "32768"],
        seed=1,
        num_gpus_per_node=8,
        sglang_dtype="float32",
        offload_rollout=False,
        use_rollout_routing_replay=False,
    )
    argv = build_argv(args, rank=0, host="127.0.0.1", port=port, nccl_port=free_port(), base_gpu_id=0, tp_size=1)
    engine = SGLangEngine(EngineSpec(0, "127.0.0.1", port, argv, server_env(), output / "served.log"))
    print(f"\n=== serving {model} ===", flush=True)
    try:
        engine.start()
        yield str(engine.url)
    finally:
        engine.stop()


def run_environment() -> dict[str, str]:
    # Ray's workers import the example's functions by name, from this repository.
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    return os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def run_train(name: str, flags: Sequence[Any], script: str = "train.py") -> None:
    """Run the driver with its output on the screen. A failure ends the example."""
    command = [sys.executable, str(ROOT / script), *map(str, flags)]
    print(f"\n=== {name} ===\n{' '.join(command)}\n", flush=True)
    process = subprocess.Popen(command, env=run_environment())
    try:
        status = process.wait(PHASE_TIMEOUT_S)
    finally:
        with suppress(ProcessLookupError):
            process.terminate()  # the driver takes its engines and trainers with it
            process.wait(30)
    if status != 0:
        raise SystemExit(f"{name} failed with status {status}; its error is above.")


def read_metrics(output: Path, name: str) -> list[dict[str, Any]]:
    """Records of the run ``--experiment-name name``."""
    return [json.loads(line) for line in (output / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def series(records: list[dict[str, Any]], name: str) -> list[float]:
    """Values of a metric, in order."""
    return [record[name] for record in records if name in record]


def print_first_and_last(what: str, records: list[dict[str, Any]], name: str = "rollout/raw_reward") -> None:
    values = series(records, name)
    print(f"{what}: {values[0]:.2f} in the first rollout, {values[-1]:.2f} in the last")
