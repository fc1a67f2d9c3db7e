"""Launchers in Python print, in a dry run, the command that the shell scripts would run."""

from __future__ import annotations

import subprocess

import pytest

from slime.compat import command_utils


@pytest.fixture
def commands(monkeypatch):
    ran: list[str] = []
    monkeypatch.setattr(command_utils, "exec_command", ran.append)
    return ran


def test_a_training_command_has_preset_flags_and_variables(commands, monkeypatch):
    called = []
    command_utils.execute_train(
        "--lr 1e-6 --save '/tmp/a b'",
        num_gpus_per_node=8,
        megatron_model_type="qwen3-4B",
        before_ray_job_submit=lambda: called.append(True),
        extra_env_vars={"NAME": "a b"},
        config=command_utils.ExecuteTrainConfig(num_nodes=1, extra_env_vars="OTHER=2"),
    )
    assert called == [True]
    monkeypatch.setenv("SLIME_DRY_RUN", "1")
    done = subprocess.run(["bash", "-c", commands[0]], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    text = done.stdout
    assert "ray job submit" in text
    assert '"NAME": "a b"' in text
    assert '"OTHER": "2"' in text
    assert "--num-layers 36" in text
    assert text.index("--num-layers 36") < text.index("--lr 1e-6")
    assert "--save '/tmp/a b'" in text


def test_a_checkpoint_is_converted_once(commands, tmp_path):
    command_utils.convert_checkpoint("m", "qwen3-4B", 2, dir_dst=str(tmp_path), extra_args="--fp16")
    (command,) = commands
    assert "torchrun --nproc-per-node=2" in command
    assert f"--hf-checkpoint {tmp_path}/m --save {tmp_path}/m_torch_dist --fp16" in command
    (tmp_path / "m_torch_dist").mkdir()
    command_utils.convert_checkpoint("m", "qwen3-4B", 2, dir_dst=str(tmp_path))
    assert len(commands) == 1


def test_variables_decide_about_tracking_and_places(commands, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert command_utils.get_default_wandb_args("tests/test_x.py") == ""
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    flags = command_utils.get_default_wandb_args("tests/test_x.py", "run", "1")
    assert flags == "--use-wandb --wandb-project slime-test_x --wandb-group run_test_x_1 "
    monkeypatch.setenv("SLIME_DATASETS_DIR", "/data")
    command_utils.hf_download_dataset("owner/name")
    assert commands == ["hf download --repo-type dataset owner/name --local-dir /data/name"]
    monkeypatch.setenv("FLAG", "True")
    assert command_utils.get_bool_env_var("FLAG")
    assert not command_utils.get_bool_env_var("OTHER_FLAG")
