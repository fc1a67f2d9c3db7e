"""Flags that change how the trainer steps, and the flags that they require."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.config.tiny_command import TinyCommand, make_command

DYNAMIC = ("--use-dynamic-batch-size", "--max-tokens-per-gpu", 100)
OWN = ("--log-probs-max-tokens-per-gpu", 400)


@pytest.fixture
def line(tmp_path: Path) -> TinyCommand:
    return make_command(tmp_path)


def test_adam_without_moments_needs_adam_and_saves_no_optimizer(line: TinyCommand) -> None:
    args = line.resolve("--use-stateless-adam", "--no-save-optim", "--lr-decay-style", "constant")
    assert args.use_stateless_adam
    _, problems = line.run("--use-stateless-adam", "--optimizer", "sgd")
    assert "--use-stateless-adam needs --optimizer adam, not sgd" in problems
    assert "needs --no-save-optim" in problems
    _, problems = line.run("--use-stateless-adam", "--optimizer-cpu-offload")
    assert "--use-stateless-adam has no states to keep on the CPU" in problems
    settings = ("--use-stateless-adam", "--no-save-optim", "--lr-decay-style", "cosine", "--save", "checkpoints")
    assert "begins anew" in line.warnings(*settings)
    assert "has 16-bit weights" in line.warnings(*settings)
    assert "has 16-bit weights" not in line.warnings(*settings, "--fp32")


def test_weights_in_fp8_are_not_exchanged_for_others(line: TinyCommand) -> None:
    _, problems = line.run("--fp8-param-gather", "--use-kl-loss", "--kl-loss-coef", 0.1, "--keep-old-actor")
    assert "--fp8-param-gather does not work with --use-kl-loss, --keep-old-actor: weights in FP8" in problems
    assert "does not work with" not in line.run("--fp8-param-gather")[1]


def test_passes_without_gradients_may_have_their_own_limit(line: TinyCommand) -> None:
    assert line.resolve(*DYNAMIC, *OWN).log_probs_max_tokens_per_gpu == 400
    assert line.resolve(*DYNAMIC).log_probs_max_tokens_per_gpu == 100
    assert "no effect without --use-dynamic-batch-size" in line.warnings(*OWN)
    _, problems = line.run(*DYNAMIC, *OWN, "--use-routing-replay")
    assert "replays micro-batch by micro-batch" in problems


def test_the_name_of_a_weight_converter_must_be_that_of_the_checkpoint(line: TinyCommand) -> None:
    for name in ("qwen3", "Qwen3Config", "qwen-3"):
        assert line.resolve("--model-name", name).model_name == name
    for name in ("qwen3moeconfig", "glm4"):
        _, problems = line.run("--model-name", name)
        assert f"--model-name {name} names the converter of" in problems
        assert "holds a model of type qwen3: leave it out" in problems
    _, problems = line.run("--model-name", "gpt5")
    assert "--model-name gpt5 names none of deepseek_v3" in problems
