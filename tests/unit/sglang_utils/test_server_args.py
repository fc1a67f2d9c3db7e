"""The command line of an engine."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
import torch

from slime.backends.sglang_utils.fork_server import compile_no_function
from slime.backends.sglang_utils.server_args import build_argv, server_env
from slime.backends.sglang_utils.topology import WorkerType
from slime.utils import accelerator
from slime.utils.net import WEIGHT_INTERFACES, WEIGHT_LOOPBACK

ADDRESSES = {"host": "127.0.0.1", "port": 1, "nccl_port": 2, "base_gpu_id": 3, "tp_size": 1}
UNUSED = {
    "use_rollout_routing_replay": False,
    "offload_rollout": False,
    "update_weights_interval": 1,
    "update_weight_changed_only": False,
}


def argv(*user: str, overrides: dict[str, Any] | None = None, **more: Any) -> list[str]:
    args = Namespace(hf_checkpoint="/m", seed=7, num_gpus_per_node=8, sglang_dtype="bfloat16", sglang_argv=list(user))
    vars(args).update(UNUSED | more)
    return build_argv(args, rank=2, overrides=overrides, **ADDRESSES)


def value(tokens: list[str], flag: str) -> str:
    """The last one counts, as in argparse."""
    return tokens[len(tokens) - tokens[::-1].index(flag)]


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "current", lambda: Namespace(is_cpu=False))


def test_every_engine_has_a_random_seed_of_its_own():
    assert value(argv(), "--random-seed") == str(7 + 2 * 8)


def test_the_trainers_precision_is_the_engines_unless_the_user_says_otherwise():
    assert value(argv(), "--dtype") == "bfloat16"
    assert argv("--dtype", "float32").count("--dtype") == 1
    assert value(argv(overrides={"dtype": "float16"}), "--dtype") == "float16"


def test_a_model_that_is_not_the_trained_one_keeps_the_precision_of_its_own_checkpoint():
    assert "--dtype" not in argv(overrides={"model_path": "/another"})


def test_user_flags_come_after_slimes_and_a_groups_overrides_after_both():
    words = argv("--context-length", "99", overrides={"context_length": 7, "random_seed": 5})
    assert value(argv("--context-length", "99"), "--context-length") == "99"
    assert value(words, "--context-length") == "7"
    assert value(words, "--random-seed") == "5"
    assert words.index("99") < words.index("7")


def test_an_override_turns_off_a_switch_that_slime_or_the_user_set():
    words = argv("--enable-metrics", overrides={"skip_server_warmup": False, "enable_metrics": False})
    assert "--skip-server-warmup" in argv()
    assert not {"--skip-server-warmup", "--enable-metrics"} & set(words)


def test_routing_replay_asks_the_engine_for_its_experts():
    assert "--enable-return-routed-experts" in argv(use_rollout_routing_replay=True)
    assert "--enable-return-routed-experts" not in argv()


@pytest.mark.usefixtures("on_gpu")
def test_on_a_gpu_an_engine_that_will_be_offloaded_can_release_its_memory():
    words = argv(offload_rollout=True)
    assert {"--enable-memory-saver", "--enable-draft-weights-cpu-backup", "--enable-metrics"} <= set(words)
    assert value(words, "--cuda-graph-backend-prefill") == "disabled"
    assert value(words, "--base-gpu-id") == "3"
    own = argv("--cuda-graph-backend-prefill", "full", offload_rollout=True)
    assert own.count("--cuda-graph-backend-prefill") == 1
    assert "--enable-memory-saver" not in argv()


@pytest.mark.usefixtures("on_gpu")
def test_an_engine_beside_the_trainers_devices_keeps_its_graphs_and_no_copy_of_its_weights():
    words = argv(offload_rollout=True, update_weights_interval=2, overrides={"enable_memory_saver": False})
    of_savers = ("--enable-memory-saver", "--enable-draft-weights-cpu-backup", "--enable-weights-cpu-backup")
    assert not {*of_savers, "--cuda-graph-backend-prefill"} & set(words)


def test_weights_that_are_not_sent_again_before_they_serve_are_kept():
    assert "--enable-weights-cpu-backup" not in argv(offload_rollout=True)
    assert "--enable-weights-cpu-backup" in argv(offload_rollout=True, update_weights_interval=2)
    assert "--enable-weights-cpu-backup" not in argv(update_weights_interval=2)
    assert "--enable-weights-cpu-backup" in argv(offload_rollout=True, update_weight_changed_only=True)


def test_without_a_gpu_an_engine_has_one_openmp_thread():
    assert server_env()["OMP_NUM_THREADS"] == "1"


def test_without_a_gpu_an_engine_compiles_no_function(monkeypatch: pytest.MonkeyPatch):
    assert server_env()["TORCHDYNAMO_DISABLE"] == "1"
    monkeypatch.setattr(torch, "compile", torch.compile)
    compile_no_function()
    assert torch.compile(sum_of) is torch.compile(dynamic=True)(sum_of) is sum_of


def sum_of(values: torch.Tensor) -> torch.Tensor:
    return values.sum()


def test_without_a_gpu_an_engine_that_drafts_reserves_memory_for_one_chain():
    words = argv("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4")
    assert value(words, "--speculative-ngram-max-bfs-breadth") == "1"
    assert words.count("--speculative-num-draft-tokens") == 1
    assert not any(word.startswith("--speculative") for word in argv())


def test_without_a_gpu_an_engine_keeps_the_memory_that_a_bucket_of_weights_took(monkeypatch: pytest.MonkeyPatch):
    bucket = 512 * 1024**2
    assert min(int(server_env()[name]) for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")) > bucket
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "131072")
    assert server_env()["MALLOC_MMAP_THRESHOLD_"] == "131072"


def test_an_engine_makes_as_many_connections_as_the_trainer_that_sends_its_weights(monkeypatch: pytest.MonkeyPatch):
    assert "GLOO_SOCKET_IFNAME" not in server_env()
    monkeypatch.setenv(WEIGHT_INTERFACES, WEIGHT_LOOPBACK)
    assert server_env()["GLOO_SOCKET_IFNAME"] == WEIGHT_LOOPBACK


def test_embeddings_of_pictures_are_not_kept_beyond_an_update_of_the_vision_tower(monkeypatch: pytest.MonkeyPatch):
    assert server_env()["SGLANG_VLM_CACHE_SIZE_MB"] == "0"
    monkeypatch.setenv("SGLANG_VLM_CACHE_SIZE_MB", "100")  # a tower that is frozen
    assert server_env()["SGLANG_VLM_CACHE_SIZE_MB"] == "100"


def test_the_environment_of_the_actor_beats_slimes(monkeypatch: pytest.MonkeyPatch):
    assert server_env()["SGLANG_JIT_DEEPGEMM_FAST_WARMUP"] == "true"
    monkeypatch.setenv("SGLANG_JIT_DEEPGEMM_FAST_WARMUP", "false")
    assert server_env()["SGLANG_JIT_DEEPGEMM_FAST_WARMUP"] == "false"


def of_kind(worker_type: WorkerType, *user: str, **more: Any) -> list[str]:
    args = Namespace(hf_checkpoint="/m", seed=7, num_gpus_per_node=8, sglang_dtype="auto", sglang_argv=list(user))
    vars(args).update(UNUSED)
    return build_argv(args, rank=0, worker_type=worker_type, **ADDRESSES, **more)


def test_prefill_and_decode_engines_know_their_part():
    prefill = of_kind(WorkerType.PREFILL, "--enable-hierarchical-cache", bootstrap_port=9000)
    assert value(prefill, "--disaggregation-mode") == "prefill"
    assert value(prefill, "--disaggregation-bootstrap-port") == "9000"
    assert value(prefill, "--load-balance-method") == "follow_bootstrap_room"
    assert "--enable-hierarchical-cache" in prefill
    decode = of_kind(WorkerType.DECODE, "--enable-hierarchical-cache")
    assert value(decode, "--disaggregation-mode") == "decode"
    assert not {"--disaggregation-bootstrap-port", "--enable-hierarchical-cache"} & set(decode)
    assert "--disaggregation-mode" not in of_kind(WorkerType.REGULAR)
