"""Values derived from the given flags: one test per derivation, numbered like the rules (test_rules.py)."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slime.config.resolve import cluster
from slime.models.config_json import read_model_config
from tests.unit.config.tiny_command import QWEN3, TinyCommand, make_model


def attributes(args: Namespace | None, names: str) -> tuple[Any, ...]:
    assert args is not None
    return tuple(getattr(args, name) for name in names.split())


@pytest.mark.parametrize(
    ("rule", "flags", "names", "values"),
    [
        ("16", "--use-dynamic-batch-size --max-tokens-per-gpu 99", "log_probs_max_tokens_per_gpu", (99,)),
        ("17", "--use-dynamic-batch-size --max-tokens-per-gpu 99 --balance-by-flops", "balance_data", (True,)),
        ("18", "--eps-clip 0.3", "eps_clip eps_clip_high", (0.3, 0.3)),
        ("18-given", "--eps-clip 0.3 --eps-clip-high 0.4", "eps_clip_high", (0.4,)),
        ("20", "--reward-key score", "eval_reward_key", ("score",)),
        ("23", "--load-debug-rollout-data x", "debug_train_only rollout_num_gpus", (True, 0)),
        ("24", "", "rollout_external", (False,)),
        ("25", "", "use_critic critic_num_nodes critic_num_gpus_per_node", (False, 1, 2)),
        ("30", "", "offload_train offload_rollout", (False, False)),
        ("34", "--num-steps-per-rollout 4", "global_batch_size num_steps_per_rollout", (8, 4)),
        ("34-batch", "--global-batch-size 8", "global_batch_size num_steps_per_rollout", (8, 4)),
        ("34-floor", "--num-steps-per-rollout 5", "global_batch_size num_steps_per_rollout", (6, 5)),
        ("34-D5", "", "global_batch_size num_steps_per_rollout", (32, 1)),
        ("35", "--n-samples-per-prompt 1 --disable-rewards-normalization", "grpo_std_normalization", (False,)),
        ("36", "", "over_sampling_batch_size", (8,)),
        ("41", "--rollout-max-context-len 64", "eval_max_context_len", (64,)),
        ("42", "--rollout-max-context-len 64", "rollout_max_prompt_len", (63,)),
        ("42-engine", "--sglang-context-length 512", "rollout_max_context_len rollout_max_prompt_len", (512, 511)),
        ("C-tis", "--use-tis --tis-threshold 0.9", "tis_clip", (0.9,)),
        ("C-tis-same", "--tis-threshold 2.5 --tis-clip 2.5", "tis_clip", (2.5,)),
        ("C-turns", "--max-turns 5", "max_turns", (5,)),
        ("C-policy", "--true-on-policy-mode", "deterministic_mode", (True,)),
        (
            "C-recompute",
            "--gradient-checkpointing",
            "recompute_granularity recompute_method recompute_num_layers",
            ("full", "uniform", 1),
        ),
        (
            "C-recompute-own",
            "--gradient-checkpointing --recompute-granularity selective",
            "recompute_granularity recompute_method",
            ("selective", None),
        ),
        ("65", "--recompute-granularity full", "recompute_method recompute_num_layers", ("uniform", 1)),
        (
            "65-size",
            "--recompute-granularity full --recompute-num-layers 2",
            "recompute_method recompute_num_layers",
            ("uniform", 2),
        ),
    ],
)
def test_a_value_follows_from_others(rule: str, flags: str, names: str, values: tuple[Any, ...], command: TinyCommand):
    args, _ = command.run(*flags.split())
    assert attributes(args, names) == values


@pytest.mark.parametrize(
    ("flags", "values"),
    [
        ("", (8, 64, 1)),
        ("--global-batch-size 32", (4, 32, 1)),
        ("--global-batch-size 32 --num-steps-per-rollout 2", (8, 32, 2)),
        ("--num-steps-per-rollout 2", (8, 32, 2)),
        ("--global-batch-size 8", (8, 8, 8)),  # one sample per prompt would teach nothing
        ("--global-batch-size 20", (8, 20, 3)),  # not a whole number per prompt
        ("--advantage-estimator ppo", (1, 8, 1)),
        ("--advantage-estimator reinforce_plus_plus --normalize-advantages", (1, 8, 1)),
        ("--loss-type sft_loss", (1, 8, 1)),
        ("--disable-rewards-normalization", (1, 8, 1)),
    ],
)
def test_a_group_that_is_not_given_follows_from_the_batch_or_is_8(
    flags: str, values: tuple[int, ...], command: TinyCommand
):
    args, _ = command.run(*flags.split(), without=("--n-samples-per-prompt",))
    assert attributes(args, "n_samples_per_prompt global_batch_size num_steps_per_rollout") == values


def test_engines_that_are_not_given_have_as_many_devices_as_the_trainer(command: TinyCommand):
    without = ("--rollout-num-gpus",)
    assert command.resolve(without=without).rollout_num_gpus == 2
    assert command.run("--rollout-num-gpus-per-engine", "4", without=without)[0].rollout_num_gpus == 4
    text = "sglang: [{name: actor, server_groups: [{worker_type: regular, num_gpus: 3}]}]"
    config = command.write("engines.yaml", text)
    assert command.resolve("--sglang-config", config, without=without).rollout_num_gpus == 3


def test_33_evaluation_uses_the_rollout_function_unless_told_otherwise(command: TinyCommand):
    assert command.resolve().eval_function_path == "slime.rollout.sglang_rollout.generate_rollout"
    own = "slime.rollout.forge_load.sleep"
    assert command.run("--rollout-function-path", own)[0].eval_function_path == own


# ---- lengths


def response_len(command: TinyCommand, *flags: str) -> int:
    return command.run(*flags, without=("--rollout-max-response-len",))[0].rollout_max_response_len


def test_d13_the_response_gets_what_the_context_leaves(command: TinyCommand):
    assert response_len(command, "--rollout-max-context-len", "64", "--rollout-max-prompt-len", "24") == 40
    assert response_len(command, "--rollout-max-context-len", "64") == 63
    assert response_len(command, "--sglang-context-length", "512") == 511


def test_d13_without_a_context_it_is_1024_or_what_the_model_can_do(command: TinyCommand):
    assert response_len(command) == 1024
    small = {**QWEN3, "max_position_embeddings": 256}
    model = make_model(command.directory / "small", small)
    assert response_len(command, "--hf-checkpoint", model) == 128
    assert response_len(command, "--hf-checkpoint", model, "--rollout-max-prompt-len", "56") == 200
    assert "--rollout-max-response-len: not given: 1024 tokens" in command.warnings(
        without=("--rollout-max-response-len",)
    )
    missing = command.warnings("--debug-train-only", without=("--rollout-max-response-len",))
    assert "not given: 1024" not in missing, "nothing is generated"


# --- run length (D23, D24)


def test_d23_without_a_length_the_run_is_one_epoch(command: TinyCommand):
    args = command.resolve("--rollout-batch-size", 4, without=("--num-rollout",))
    assert attributes(args, "num_rollout num_epoch") == (None, 1)
    assert "neither it nor --num-epoch is given: one epoch" in command.warnings(without=("--num-rollout",))


def test_d24_without_a_batch_size_it_is_32(command: TinyCommand):
    args = command.resolve(without=("--rollout-batch-size",))
    assert attributes(args, "rollout_batch_size global_batch_size") == (32, 128)


def test_a28_samples_that_fill_no_step_are_a_warning(command: TinyCommand):
    assert "the last 8 samples of every rollout do not fill a step" in command.warnings("--global-batch-size", "12")
    assert command.warnings("--global-batch-size", "16") == ""


# ---- evaluation and rewards


def test_d2_repeated_evaluation_sets_add_up(command: TinyCommand):
    args = command.resolve("--eval-prompt-data", "a", command.prompts, "--eval-prompt-data", "b", command.prompts)
    assert [(item.name, item.path) for item in args.eval_datasets] == [("a", command.prompts), ("b", command.prompts)]


def test_a5_a_lone_file_is_called_aime_with_a_warning(command: TinyCommand):
    (only,) = command.resolve("--eval-prompt-data", command.prompts).eval_datasets
    assert only.name == "aime"
    assert "the set is called aime" in command.warnings("--eval-prompt-data", command.prompts)


def test_d10_an_interval_without_sets_switches_evaluation_off(command: TinyCommand):
    args = command.resolve("--eval-interval", "5")
    assert args.eval_interval is None
    assert "evaluation is off" in command.warnings("--eval-interval", "5")


def test_d10_an_interval_without_a_directory_saves_below_the_output_directory(command: TinyCommand):
    args = command.resolve("--save-interval", "5", "--output-dir", "{dir}/out")
    assert args.save == f"{command.directory}/out/checkpoints"


def test_checkpoints_of_another_run_are_not_where_a_run_saves_unasked(command: TinyCommand):
    default = megatron_checkpoint(command.directory / "out" / "checkpoints")
    flags = ("--save-interval", 5, "--output-dir", "{dir}/out", "--experiment-name", "mine")
    assert command.resolve(*flags).save == f"{command.directory}/out/mine/checkpoints"
    assert f"--load {default} goes on with them" in command.warnings(*flags)
    assert command.resolve(*flags, "--load", default).save == default


def test_a_run_that_would_replace_checkpoints_of_another_one_says_so(command: TinyCommand):
    old = megatron_checkpoint(command.directory / "old")
    flags = ("--save-interval", 5, "--save", old)
    assert f"--save: {old} holds iter_0000003 of another run" in command.warnings(*flags)
    assert "of another run" not in command.warnings(*flags, "--load", f"{old}/../old")
    assert "of another run" not in command.warnings("--save-interval", 5, "--save", f"{old}_new")


def test_a_run_that_has_ended_says_at_the_start_that_nothing_is_left(command: TinyCommand):
    old = megatron_checkpoint(command.directory / "old")
    flags = ("--load", old, "--save", old, "--save-interval", 1)
    for num_rollout in (3, 4):
        assert f"{num_rollout}: {old}/iter_0000003 was saved" in command.warnings(*flags, "--num-rollout", num_rollout)
    assert "nothing is left" not in command.warnings(*flags, "--num-rollout", 5)
    assert "nothing is left" not in command.warnings(*flags, "--num-rollout", 4, "--finetune")
    args, _ = command.run(*flags, "--num-rollout", 10)
    assert f"--num-rollout: {old}/iter_0000003 has 4 of them, and 6 are left" in map(str, args.notices)


def test_d12_labels_without_a_reward_are_graded_as_mathematics(command: TinyCommand):
    args = command.resolve(without=("--rm-type",))
    assert args.rm_type == "math"
    assert "answers are graded as mathematics" in command.warnings(without=("--rm-type",))


def test_d12_a_row_that_names_its_reward_is_left_alone(command: TinyCommand):
    path = command.write("own.jsonl", '{"prompt": "x", "label": "1", "metadata": {"rm_type": "f1"}}\n')
    assert command.resolve("--prompt-data", path, without=("--rm-type",)).rm_type is None


def test_d12_supervised_training_needs_no_reward(command: TinyCommand):
    sft = "slime.rollout.sft_rollout.generate_rollout"
    args, problems = command.run("--rollout-function-path", sft, "--loss-type", "sft_loss", without=("--rm-type",))
    assert args is not None
    assert args.rm_type is None
    assert "--rm-type" not in problems


# ---- checkpoints


def megatron_checkpoint(directory: Path) -> str:
    """The files that the command line reads: the tracker and one complete iteration."""
    iteration = directory / "iter_0000003"
    iteration.mkdir(parents=True)
    (directory / "latest_checkpointed_iteration.txt").write_text("3")
    for name in (".metadata", "metadata.json", "common.pt"):
        (iteration / name).write_text("{}")
    return str(directory)


def test_d9_the_reference_is_the_first_of_initial_load_and_hf_checkpoint(command: TinyCommand):
    initial = megatron_checkpoint(command.directory / "initial")
    load = megatron_checkpoint(command.directory / "load")
    kl = ("--use-kl-loss", "--kl-loss-type", "k2")
    assert command.run(*kl)[0].ref_load == command.model
    assert command.run(*kl, "--load", load, "--ckpt-step", "3")[0].ref_load == load
    assert command.run(*kl, "--load", load, "--ckpt-step", "3")[0].ref_ckpt_step == 3
    assert command.run(*kl, "--load", load, "--initial-megatron-checkpoint", initial)[0].ref_load == initial
    assert command.run(*kl, "--pretrained-checkpoint", initial)[0].ref_load == initial
    assert command.run("--load", load)[0].ref_load is None


def test_d9_a_run_that_resumes_itself_keeps_its_first_reference(command: TinyCommand):
    own = megatron_checkpoint(command.directory / "own")
    args, _ = command.run("--use-kl-loss", "--load", own, "--save", own, "--save-interval", "1")
    assert args.ref_load == command.model


def test_the_initial_checkpoint_gives_weights_only_and_only_while_load_is_empty(command: TinyCommand):
    initial = megatron_checkpoint(command.directory / "initial")
    args, _ = command.run("--initial-megatron-checkpoint", initial)
    names = "load ref_load finetune no_load_optim no_load_rng start_rollout_id"
    assert attributes(args, names) == (initial, initial, True, True, True, 0)
    resumed = megatron_checkpoint(command.directory / "own")
    args, _ = command.run("--initial-megatron-checkpoint", initial, "--load", resumed)
    assert attributes(args, names) == (resumed, initial, False, False, False, None)
    args, _ = command.run("--initial-megatron-checkpoint", initial, "--ref-load", command.model)
    assert attributes(args, "load ref_load") == (initial, command.model)


# ---- devices


def test_29_engines_that_share_devices_take_those_of_the_trainer(command: TinyCommand):
    args, _ = command.run("--colocate", without=("--rollout-num-gpus",))
    assert attributes(args, "rollout_num_gpus offload_train offload_rollout") == (2, True, True)
    args, _ = command.run("--colocate", "--no-offload-train")
    assert attributes(args, "rollout_num_gpus offload_train offload_rollout") == (1, False, True)


def test_29_trainers_that_end_are_not_offloaded(command: TinyCommand):
    args, _ = command.run("--colocate", "--release-train", "--offload-train")
    assert attributes(args, "offload_train offload_rollout save_interval") == (False, True, 1)
    assert "trainers end instead of being offloaded" in command.warnings(
        "--colocate", "--release-train", "--offload-train"
    )


def test_45_trainers_that_end_save_and_send_their_weights_every_time(command: TinyCommand):
    flags = ("--colocate", "--release-train", "--save-interval", "5", "--update-weights-interval", "2")
    args, _ = command.run(*flags)
    assert attributes(args, "save_interval update_weights_interval") == (1, 1)
    assert command.warnings(*flags).count("starts every step from a checkpoint") == 2


def test_26_offload_is_both_switches(command: TinyCommand):
    names = "offload_train offload_rollout disable_grad_buffers_cpu_backup disable_param_buffers_cpu_backup"
    assert attributes(command.run("--offload")[0], names) == (True, True, True, True)


def test_27_without_a_trainer_nothing_is_shared_or_offloaded(command: TinyCommand):
    args, _ = command.run("--debug-rollout-only", "--colocate", "--offload", without=("--rollout-num-gpus",))
    assert attributes(args, "colocate offload_train offload_rollout rollout_num_gpus") == (False, False, False, 2)
    args, _ = command.run("--debug-rollout-only", without=("--rollout-num-gpus",))
    assert args.rollout_num_gpus == 1


def test_25_and_31_ppo_brings_a_critic_that_shares_the_devices(command: TinyCommand):
    args, _ = command.run("--advantage-estimator", "ppo", "--actor-num-nodes", "2")
    assert attributes(args, "use_critic critic_num_nodes critic_num_gpus_per_node offload_train") == (True, 2, 2, True)


# --- the rest


def test_39_engine_routing_replay_implies_the_trainer_s(command: TinyCommand):
    assert command.run("--use-rollout-routing-replay")[0].use_routing_replay is True


def test_21_one_directory_stands_for_both_dumps(command: TinyCommand):
    args, _ = command.run("--dump-details", "{dir}/d", "--save-debug-rollout-data", "{dir}/mine.pt")
    root = command.directory / "d"
    assert args.save_debug_rollout_data == str(root / "rollout_data" / "{rollout_id}.pt")
    assert args.save_debug_train_data == str(root / "train_data" / "{rollout_id}.pt")


def test_paths_are_absolute_because_workers_have_another_directory(
    command: TinyCommand, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(command.directory)
    command.write("mine.py", "def reward_func(args, sample, **kwargs): return 0.0\ndef hook(args, sample): pass\n")
    more = ["--custom-rm-path", "mine.py", "--rollout-sample-hook-path", "mine.py:hook", "--output-dir", "out"]
    more += ["--tensorboard-dir", "traces", "--wandb-dir", "wandb"]
    args = command.resolve(*more)
    here = str(command.directory)
    assert attributes(args, "tensorboard_dir wandb_dir memory_snapshot_dir") == (
        f"{here}/traces",
        f"{here}/wandb",
        here,
    )
    assert args.custom_rm_path == f"{here}/mine.py"
    assert args.rollout_sample_hook_path == [f"{here}/mine.py:hook"]
    assert args.output_dir == f"{here}/out"
    assert args.data_source_path == "slime.rollout.data_source.RolloutDataSourceWithBuffer"


def test_without_a_checkpoint_nothing_follows_from_a_file_that_happens_to_be_here(
    command: TinyCommand, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(command.model)
    assert read_model_config(command.model)["num_hidden_layers"] == 2
    assert read_model_config(None) == {}


def test_the_yaml_file_is_applied_before_anything_is_derived(command: TinyCommand):
    path = command.write("c.yaml", "eps_clip: 1e-1\nrollout_batch_size: 16\nadvantage_estimator: ppo\nmine: 3\n")
    args, _ = command.run("--custom-config-path", path, without=("--rollout-batch-size",))
    assert attributes(args, "eps_clip_high global_batch_size use_critic mine") == (0.1, 64, True, 3)


def test_a_flag_beats_the_yaml_file_which_beats_the_default(command: TinyCommand):
    path = command.write("c.yaml", "eps_clip: 0.5\nkl_loss_coef: 0.25\n")
    args = command.resolve("--custom-config-path", path, "--eps-clip", "0.75")
    assert attributes(args, "eps_clip kl_loss_coef gamma") == (0.75, 0.25, 1.0)


@pytest.mark.parametrize(("is_cpu", "flags"), [(True, []), (False, ["--enable-deterministic-inference"])])
def test_on_policy_mode_turns_on_deterministic_engines_where_they_have_the_switch(
    is_cpu: bool, flags: list[str], command: TinyCommand, monkeypatch: pytest.MonkeyPatch
):
    from slime.config.resolve import objective

    monkeypatch.setattr(objective.accelerator, "current", lambda: Namespace(is_cpu=is_cpu))
    args = Namespace(true_on_policy_mode=True, debug_train_only=False, sglang_argv=[], notices=[])
    objective.true_on_policy(args)
    assert args.sglang_argv == flags


def test_every_step_leaves_a_resolved_namespace_as_it_is(command: TinyCommand):
    args = command.resolve("--eval-prompt-data", "a", command.prompts)
    before = dict(vars(args))
    cluster.devices(args)
    cluster.offloading(args)
    assert vars(args) == before


@pytest.mark.parametrize(
    ("flags", "is_told"),
    [
        ("--actor-num-gpus-per-node 6 --rollout-num-gpus 8 --rollout-num-gpus-per-engine 4", True),
        ("--actor-num-gpus-per-node 4 --rollout-num-gpus 8 --rollout-num-gpus-per-engine 4", False),
        ("--actor-num-gpus-per-node 4 --rollout-num-gpus 6 --rollout-num-gpus-per-engine 3", True),
        ("--actor-num-gpus-per-node 6 --rollout-num-gpus 9", False),
        ("--actor-num-gpus-per-node 6 --colocate --rollout-num-gpus-per-engine 2", False),
    ],
)
def test_b7_an_engine_that_would_stand_on_two_nodes_is_a_warning(flags: str, is_told: bool, command: TinyCommand):
    assert ("an engine would be on two nodes of --num-gpus-per-node 8" in command.warnings(*flags.split())) is is_told


@pytest.mark.parametrize(
    ("flags", "warning"),
    [
        ("--eval-prompt-data a {dir}/prompts.jsonl", "--eval-interval: not given: the evaluation sets are never used"),
        ("--tis-threshold 1.5", "--tis-threshold 1.5: no effect without --use-tis"),
        ("--gae-trained-tokens-only", "--gae-trained-tokens-only: no effect with --advantage-estimator grpo"),
        ("--rollout-max-response-len 4096", "--rollout-max-response-len 4096: the model of --hf-checkpoint takes 4096"),
    ],
)
def test_what_was_probably_not_meant_is_a_warning(flags: str, warning: str, command: TinyCommand):
    assert warning in command.warnings(*flags.split())


# --- the environment


def test_a_variable_that_means_nothing_here_is_told(command: TinyCommand, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("INDEXER_ROPE_NEOX_STYLE", "0")
    assert "INDEXER" not in command.warnings()
    monkeypatch.setenv("INDEXER_ROPE_NEOX_STYLE", "1")
    assert "INDEXER_ROPE_NEOX_STYLE: has no effect: config.json says" in command.warnings()


def test_expandable_segments_are_switched_on_in_the_trainers_environment(
    command: TinyCommand, monkeypatch: pytest.MonkeyPatch
):
    assert command.resolve().train_env_vars == {}
    monkeypatch.setenv("SLIME_ENABLE_EXPANDABLE_SEGMENTS", "1")
    assert command.resolve().train_env_vars == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    own = ("--train-env-vars", '{"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}')
    assert command.resolve(*own).train_env_vars == {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}
    monkeypatch.setenv("SLIME_ENABLE_EXPANDABLE_SEGMENTS", "yes")
    assert "SLIME_ENABLE_EXPANDABLE_SEGMENTS=yes" in str(command.run()[1])


@pytest.mark.parametrize(
    "flags", ["", "--debug-rollout-only", "--sglang-router-ip 10.0.0.1 --sglang-router-port 30000"]
)
def test_a17_a_run_may_have_a_router_and_no_engine(flags: str, command: TinyCommand):
    args = command.resolve("--rollout-num-gpus", "0", *flags.split(), without=("--rollout-num-gpus",))
    assert args.rollout_num_gpus == 0


def test_29_without_engines_nothing_shares_the_devices_of_the_trainer(command: TinyCommand):
    args = command.resolve("--colocate", "--rollout-num-gpus", "0", without=("--rollout-num-gpus",))
    assert attributes(args, "rollout_num_gpus colocate offload_train offload_rollout") == (0, False, False, False)


# ---- flags without effect


@pytest.mark.parametrize(
    ("flags", "flag", "needs"),
    [
        ("--kl-loss-coef 0.1", "--kl-loss-coef", "--use-kl-loss"),
        ("--use-unbiased-kl", "--use-unbiased-kl", "--use-kl-loss"),
        ("--opsm-delta 0.1", "--opsm-delta", "--use-opsm"),
        ("--tis-clip 3", "--tis-clip", "--use-tis or --get-mismatch-metrics"),
        ("--opd-kl-coef 0.5", "--opd-kl-coef", "--use-opd"),
        ("--num-critic-only-steps 2", "--num-critic-only-steps", "an --advantage-estimator with a critic"),
        ("--eps-clip-c 3 --advantage-estimator cispo", "--eps-clip-c", "an --advantage-estimator with PPO's surrogate"),
        ("--gamma 0.9", "--gamma", "an --advantage-estimator that discounts rewards"),
        ("--custom-tis-function-path {tis}", "--custom-tis-function-path", "--use-tis or --get-mismatch-metrics"),
        ("--custom-loss-function-path {loss}", "--custom-loss-function-path", "--loss-type custom_loss"),
        ("--ref-update-interval 2", "--ref-update-interval", "--use-kl-loss or --kl-coef"),
        ("--keep-old-actor", "--keep-old-actor", "train_async.py or --update-weights-interval 2"),
        ("--opd-teacher-ckpt-step 3", "--opd-teacher-ckpt-step", "--opd-teacher-load"),
        (
            "--use-routing-replay",
            "--use-routing-replay",
            "a pass before training, such as with --num-steps-per-rollout",
        ),
        ("--max-tokens-per-gpu 9", "--max-tokens-per-gpu", "--use-dynamic-batch-size"),
        ("--min-lr 1e-7 --lr-decay-style constant", "--min-lr", "an --lr-decay-style that decays"),
        ("--sgd-momentum 0.5", "--sgd-momentum", "--optimizer sgd"),
        ("--muon-momentum 0.5", "--muon-momentum", "--optimizer muon"),
        ("--lora-alpha 8", "--lora-alpha", "--lora-rank"),
        ("--max-weight-staleness 1", "--max-weight-staleness", "train_async.py"),
        ("--profile-step-start 1", "--profile-step-start", "--use-pytorch-profiler"),
        ("--memory-snapshot-num-steps 2", "--memory-snapshot-num-steps", "--record-memory-history"),
        ("--wandb-group mine", "--wandb-group", "--use-wandb"),
        ("--background-eval", "--background-eval", "--eval-interval"),
    ],
)
def test_a_flag_without_its_switch_is_a_warning(flags: str, flag: str, needs: str, command: TinyCommand):
    loss = "slime.backends.megatron_utils.loss"
    words = flags.format(tis=f"{loss}:icepop_function", loss=f"{loss}:policy_loss_function").split()
    assert f"{flag}: no effect without {needs}" in command.warnings(*words)


@pytest.mark.parametrize(
    ("flags", "flag", "is_async"),
    [
        ("--ref-update-interval 2 --use-kl-loss --kl-loss-coef 0.1 --kl-loss-type k2", "--ref-update-interval", False),
        ("--keep-old-actor", "--keep-old-actor", True),
        ("--keep-old-actor --update-weights-interval 2", "--keep-old-actor", False),
        ("--use-routing-replay --num-steps-per-rollout 2", "--use-routing-replay", False),
        ("--use-routing-replay --use-rollout-entropy", "--use-routing-replay", False),
        ("--max-weight-staleness 1", "--max-weight-staleness", True),
    ],
)
def test_a_flag_that_is_read_is_no_warning(flags: str, flag: str, is_async: bool, command: TinyCommand):
    assert f"{flag}: no effect" not in command.warnings(*flags.split(), is_async=is_async)


def test_fine_tuning_has_no_other_terms(command: TinyCommand):
    warnings = command.warnings(
        *["--loss-type", "sft_loss", "--use-kl-loss", "--kl-loss-coef", "0.1", "--entropy-coef", "0.1"]
    )
    for flag in ("--use-kl-loss", "--entropy-coef"):
        assert f"{flag}: no effect with --loss-type sft_loss" in warnings


def test_a_teacher_of_sglang_scores_at_temperature_1(command: TinyCommand):
    flags = ["--use-opd", "--opd-type", "sglang", "--rm-url", "http://localhost:1/generate", "--rollout-temperature"]
    assert "SGLang scores prompts at temperature 1" in command.warnings(*flags, "0.7")
    assert "temperature 1" not in command.warnings(*flags, "1")
