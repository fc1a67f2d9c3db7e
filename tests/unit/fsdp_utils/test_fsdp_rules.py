"""Flags that ``--train-backend fsdp`` accepts, refuses, and ignores with a warning."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.config.tiny_command import QWEN3, TinyCommand, make_command, make_model

FSDP = ("--train-backend", "fsdp")


@pytest.fixture
def command(tmp_path: Path) -> TinyCommand:
    return make_command(tmp_path)


def test_a_command_without_model_flags_works_and_recomputes_layers_on_request(command: TinyCommand):
    args = command.resolve(*FSDP, "--gradient-checkpointing", "--context-parallel-size", 2)
    assert (args.train_backend, args.recompute_granularity, args.data_parallel_size) == ("fsdp", "full", 1)


def test_a_model_that_no_family_of_megatron_knows_can_be_trained(command: TinyCommand):
    make_model(Path(command.model), QWEN3 | {"model_type": "gemma", "architectures": ["GemmaForCausalLM"]})
    assert "gemma" in command.run()[1]
    assert command.run(*FSDP)[1] == ""
    assert command.run(*FSDP, "--balance-data")[1].startswith("--balance-data does not know how much this model")


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--tensor-model-parallel-size 2", "--tensor-model-parallel-size 2 does not work with --train-backend fsdp"),
        ("--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 2 does not work with"),
        ("--expert-model-parallel-size 2", "--expert-model-parallel-size 2 does not work with"),
        ("--fp16", "--fp16 is not supported yet with --train-backend fsdp: there is no loss scale"),
        ("--advantage-estimator ppo", "--advantage-estimator ppo is not supported yet with --train-backend fsdp"),
        ("--fp8-format e4m3", "--fp8-format is not supported yet with --train-backend fsdp"),
        ("--transformer-impl transformer_engine", "--transformer-impl transformer_engine does not work with"),
        ("--optimizer muon", "--optimizer muon is not supported yet with --train-backend fsdp"),
        (
            "--optimizer-cpu-offload --use-precision-aware-optimizer",
            "--optimizer-cpu-offload is not supported yet with --train-backend fsdp: its states stay on the device",
        ),
        ("--num-distributed-optimizer-instances 2", "2 does not work with --train-backend fsdp"),
        ("--use-routing-replay", "--use-routing-replay is not supported yet with"),
        ("--mtp-num-layers 1", "--mtp-num-layers is not supported yet with"),
        ("--attention-dropout 0.1", "--attention-dropout is not supported yet with"),
        ("--hidden-dropout 0.1", "--hidden-dropout is not supported yet with"),
        ("--async-save --save {dir}/save", "--async-save is not supported yet with"),
        ("--freeze-params-name-list embed", "--freeze-params-name-list is not supported yet with"),
        ("--recompute-granularity selective", "recomputes every layer or none: use --gradient-checkpointing"),
        ("--attn-implementation sdpa --context-parallel-size 2", "--attn-implementation sdpa sees one rank's tokens"),
        ("--lr-warmup-iters 3 --lr-warmup-fraction 0.1", "exclude each other"),
        ("--release-train", "--release-train works with --train-backend megatron only"),
    ],
)
def test_what_it_does_not_have_is_refused_before_anything_starts(command: TinyCommand, flags: str, problem: str):
    assert problem in command.run(*FSDP, *flags.split())[1]


def test_parts_of_megatron_are_not_tuned(command: TinyCommand):
    assert "--ddp-bucket-size: no effect with --train-backend fsdp" in command.warnings(*FSDP, "--ddp-bucket-size", "9")


def test_a_model_with_sparse_attention_is_refused(command: TinyCommand):
    make_model(Path(command.model), QWEN3 | {"model_type": "deepseek_v32", "index_topk": 2048})
    assert "has sparse attention, which is not supported yet with --train-backend fsdp" in command.run(*FSDP)[1]


@pytest.mark.parametrize(
    ("fields", "is_refused"),
    [
        ({"model_type": "mistral", "sliding_window": 4096}, True),
        ({"model_type": "mistral", "sliding_window": None}, False),
        ({"sliding_window": 4096}, False),  # of a Qwen, which has them off by default
        ({"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 0}, False),
        ({"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 2}, False),
        ({"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 1}, True),
        ({"model_type": "gemma3_text", "layer_types": ["sliding_attention", "full_attention"]}, True),
        ({"model_type": "olmo3", "sliding_window": 4096, "layer_types": ["full_attention"] * 2}, False),
    ],
)
def test_sliding_windows_need_the_attention_of_transformers(
    command: TinyCommand, fields: dict[str, object], is_refused: bool
):
    make_model(Path(command.model), QWEN3 | fields)
    problem = "has layers with sliding windows, which slime's attention does not have: use --attn-implementation sdpa"
    assert (problem in command.run(*FSDP)[1]) == is_refused
    assert problem not in command.run(*FSDP, "--attn-implementation", "sdpa")[1]


def test_flags_of_the_model_s_shape_are_ignored_with_a_warning_where_they_differ(command: TinyCommand):
    assert command.warnings(*FSDP, "--num-layers", 2) == command.warnings(*FSDP)
    assert command.run(*FSDP, "--num-layers", 3)[1] == ""
    (told,) = set(command.warnings(*FSDP, "--num-layers", 3).splitlines()) - set(command.warnings(*FSDP).splitlines())
    assert told.startswith("--num-layers")
    assert "differs from num_hidden_layers 2" in told
    assert "ignored" in told
    assert "differs" in command.run("--num-layers", 3)[1]


def test_a_checkpoint_of_the_other_backend_is_refused_before_anything_starts(command: TinyCommand):
    iteration = Path(command.directory) / "saved" / "iter_0000003"
    for backend, other in (("torch_dist", "fsdp"), ("fsdp", "megatron")):
        command.write(f"saved/{iteration.name}/metadata.json", f'{{"sharded_backend": "{backend}"}}')
        command.write("saved/latest_checkpointed_iteration.txt", "3")
        _, problems = command.run("--train-backend", other, "--load", "{dir}/saved")
        assert f"--train-backend {other} reads its own checkpoints" in problems


def test_the_choice_of_transformers_attention_says_so_where_it_has_no_effect(command: TinyCommand):
    assert "--attn-implementation sdpa" in command.warnings("--attn-implementation", "sdpa")
    assert "--attn-implementation" not in command.warnings(*FSDP, "--attn-implementation", "sdpa")
