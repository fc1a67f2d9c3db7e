"""The benchmarks of the trainer and of many engines run at a tiny size. Their times are not judged."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import trl_step
from benchmarks.many_engines import table
from tests.programs import run_program
from tools.make_tiny_task import make_tiny_task

ROOT = Path(__file__).parents[3]


def result_of(*words: str) -> dict[str, Any]:
    """The first line of the output of a benchmark."""
    done = run_program(*words)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[0])
    return found


def test_a_train_step_and_a_bare_loop_of_megatron_take_turns() -> None:
    found = result_of("benchmarks/train_step.py", "--rounds", "1", "--samples", "2", "--tokens", "16")
    assert found["tokens"] == 32
    assert found["ratio"] > 0


def test_samples_of_one_prompt_take_turns_with_the_same_samples_apart() -> None:
    words = ("benchmarks/shared_prefixes.py", "--rounds", "1", "--samples", "4", "--scale", "0.1")
    found = result_of(*words)
    assert (found["tokens"], found["unique_share"]) == (4 * 120, 0.375)
    # counted bytes: they do not depend on the machine
    assert 0.3 < found["memory_ratio"] < 0.7
    assert result_of(*words, "--kernels")["ratio"] > 0


def test_log_probs_take_the_memory_of_one_chunk() -> None:
    words = ("--rows", "128", "--vocabulary", "4000", "--chunk", "32")
    found = result_of("benchmarks/logprob_memory.py", *words)
    # counted bytes: they do not depend on the machine
    assert 0.9 < found["forward_chunks"] <= 1.2
    assert 0.9 < found["training_chunks"] <= 1.2


def test_all_samples_of_a_rollout_are_in_flight_on_simulated_engines() -> None:
    words = ("--samples", "64", "--engines", "8", "--ranks", "4", "--rounds", "1")
    found = result_of("benchmarks/many_engines.py", *words)["64"]
    assert set(found) == {"rollout_us", "columns_us", "schedule_us", "in_flight_kib", "batch_kib"}
    text = table({64: found}, engines=8, ranks=4)
    assert text.splitlines()[-1].startswith("| 64 | ")
    assert len({line.count("|") for line in text.splitlines()}) == 1


def test_our_side_makes_a_step_of_the_samples_that_trl_gets(tmp_path: Path) -> None:
    model = make_tiny_task(tmp_path).model
    vocabulary = json.loads(Path(model, "config.json").read_text())["vocab_size"]
    job = {"samples": 4, "group": 2, "prompt": 3, "response": 5, "per_micro_batch": 2, "rounds": 2}
    job |= {"model": model, "vocabulary": vocabulary}
    prompts, responses, rewards = trl_step.tokens_of(job)
    assert prompts[0] == prompts[1] != prompts[2]
    assert (len(responses), len(rewards), {len(one) for one in responses}) == (4, 4, {5})
    rounds = trl_step.compare(job, {"ours": sys.executable})
    assert len(rounds) == 2
    assert all(seconds > 0 for one in rounds for seconds in one["ours"])


def test_a_side_that_ends_is_an_error(tmp_path: Path) -> None:
    side = trl_step.Side("false", "ours", {"model": str(tmp_path)})
    with pytest.raises((SystemExit, BrokenPipeError)):
        side.step()
