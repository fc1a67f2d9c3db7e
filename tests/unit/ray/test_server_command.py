"""The command line of the log-prob server: that of a training run, reduced to the flags of the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime.backends.megatron_utils.server.queue import RoundSettings
from slime.backends.training.arguments import ParallelArgs
from slime.config.groups import from_args
from slime.ray import logprob_server
from slime.ray.logprob_server import parse_server_args
from slime.utils.errors import ConfigError
from tests.unit.config.tiny_command import TinyCommand, make_command


@pytest.fixture
def command(tmp_path: Path) -> TinyCommand:
    return make_command(tmp_path)


def test_the_flags_of_a_training_run_become_those_of_a_model_that_only_scores(command: TinyCommand) -> None:
    training = (
        "--advantage-estimator ppo --use-kl-loss --use-opd --opd-type sglang --colocate --use-wandb --kl-coef 0.1"
    )
    args = parse_server_args(
        [*command.flags, *training.split(), "--teacher-port", "81", "--keep-old-actor", "--debug-rollout-only"]
    )
    assert (args.teacher_port, args.world_size, args.rollout_temperature) == (81, 2, 1.0)
    assert args.debug_train_only
    assert not args.debug_rollout_only
    for name in ("use_kl_loss", "use_opd", "use_critic", "offload_train", "use_wandb", "keep_old_actor", "kl_coef"):
        assert not getattr(args, name), name


def test_help_names_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_server_args(["--help"])
    usage = capsys.readouterr().out
    assert usage.startswith("usage: python -m slime.backends.megatron_utils.server.megatron_server --hf-checkpoint DIR")
    assert "train.py" not in usage.partition("options:")[0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--teacher-warmup-port", "0"], "--teacher-warmup-port 0 must be above 0"),
        (["--megatron-server-max-length", "-1"], "--megatron-server-max-length -1 must be at least 0"),
        (["--train-backend", "fsdp"], "the log-prob server runs on megatron only"),
        (["--tensor-model-parallel-size", "3"], "--tensor-model-parallel-size 3"),
        (["--load", "/nowhere"], "--load /nowhere: there is no such directory"),
    ],
)
def test_what_cannot_work_is_said_before_anything_starts(command: TinyCommand, flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_server_args([*command.flags, *flags])
    assert message in str(caught.value)


def test_the_model_must_be_named(command: TinyCommand) -> None:
    with pytest.raises(ConfigError, match="--hf-checkpoint is required"):
        parse_server_args([])


def test_a_round_is_as_large_as_the_flags_of_memory_and_layout_say(command: TinyCommand) -> None:
    def settings(*flags: str) -> RoundSettings:
        args = parse_server_args([*command.flags, *flags])
        parallel = from_args(ParallelArgs, args)
        return logprob_server._round_settings(args.world_size, parallel, args.max_tokens_per_gpu)

    assert settings() == RoundSettings(max_tokens=0, data_parallel_size=2, num_micro_batches=2)
    budget = ("--max-tokens-per-gpu", "100", "--context-parallel-size", "2")
    assert settings(*budget) == RoundSettings(max_tokens=200, data_parallel_size=1, num_micro_batches=2)
    stages = ("--max-tokens-per-gpu", "100", "--pipeline-model-parallel-size", "2")
    assert settings(*stages) == RoundSettings(max_tokens=100, data_parallel_size=1, num_micro_batches=3)


def test_what_the_server_tells_of_itself_has_no_secrets(command: TinyCommand) -> None:
    args = parse_server_args([*command.flags, "--wandb-key", "abc123"])
    shown = logprob_server._shown(vars(args))
    assert shown["hf_checkpoint"] == args.hf_checkpoint
    assert "abc123" not in json.dumps(shown)
