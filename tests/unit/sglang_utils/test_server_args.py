"""The command line of an engine."""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace
from typing import Any

import pytest

from slime.backends.sglang_utils.server_args import build_argv, check_user_flags, known_flags, server_env


def argv(*user: str, **more: Any) -> list[str]:
    args = Namespace(
        hf_checkpoint="/m", seed=7, num_gpus_per_node=8, fp32=False, fp16=False, sglang_argv=list(user), **{}
    )
    vars(args).update(more)
    return build_argv(args, rank=2, host="127.0.0.1", port=1, nccl_port=2, base_gpu_id=3, tp_size=1)


def value(tokens: list[str], flag: str) -> str:
    return tokens[tokens.index(flag) + 1]


def test_every_engine_has_a_random_seed_of_its_own():
    assert value(argv(), "--random-seed") == str(7 + 2 * 8)


def test_the_trainers_precision_is_the_engines_unless_the_user_says_otherwise():
    assert value(argv(fp32=True), "--dtype") == "float32"
    assert value(argv(fp16=True), "--dtype") == "float16"
    assert "--dtype" not in argv()
    assert argv("--dtype", "bfloat16", fp32=True).count("--dtype") == 1


def test_user_flags_come_last_so_that_they_win():
    assert argv("--context-length", "99")[-2:] == ["--context-length", "99"]


@pytest.mark.parametrize(
    "flag", ["--port", "--tp-size", "--model-path", "--model", "--nccl-init-addr", "--config", "--random-seed"]
)
def test_flags_that_slime_computes_cannot_be_set(flag: str):
    (problem,) = check_user_flags(Namespace(sglang_argv=[flag, "1"]))
    assert f"--sglang-{flag[2:]} cannot be set" in problem


def test_the_installed_servers_flags_are_found_without_importing_it():
    code = (
        "from slime.backends.sglang_utils.server_args import known_flags; import sys; "
        "f = known_flags(); assert {'--context-length', '--mem-fraction-static', '--attention-backend'} <= f; "
        "assert '--no-such-flag' not in f; assert 'sglang' not in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert len(known_flags()) > 300


def test_without_a_gpu_an_engine_has_one_openmp_thread():
    assert server_env()["OMP_NUM_THREADS"] == "1"
