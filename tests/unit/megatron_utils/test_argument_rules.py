"""Combinations of Megatron flags. Numbers in the ids count the rules of launch scripts written for Megatron."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime.backends.megatron_utils import arguments
from slime.backends.megatron_utils.argument_rules import RULES, STEPS
from slime.backends.megatron_utils.optimizer_rules import low_precision_here
from slime.config.groups import flags_of, groups_in
from slime.utils import accelerator
from slime.utils.errors import ConfigError
from tests.unit.megatron_utils.command_lines import problems_of, resolved, write_config
from tests.unit.megatron_utils.hub_hybrid import QWEN3_NEXT_80B
from tests.unit.megatron_utils.hub_models import DEEPSEEK_V3, GLM4_9B, QWEN3_4B, QWEN3_30B

_TP2 = "--tensor-model-parallel-size 2"
_PP4 = "--pipeline-model-parallel-size 4"


@pytest.mark.parametrize(
    ("config", "words", "world_size", "message"),
    [
        pytest.param(
            QWEN3_30B,
            "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 4",
            4,
            r"4 trainer ranks must be a multiple of --expert-tensor-parallel-size 2 x --expert-model-parallel-size 4",
            id="59-expert-ranks",
        ),
        pytest.param(QWEN3_30B, "--expert-model-parallel-size 3", 3, "must divide the 128 experts", id="59-experts"),
        pytest.param(QWEN3_4B, "--expert-model-parallel-size 2", 2, "has no experts; use 1", id="59-no-experts"),
        pytest.param(
            QWEN3_30B,
            f"{_TP2} --sequence-parallel --expert-tensor-parallel-size 1",
            2,
            "--expert-tensor-parallel-size 1 differs from --tensor-model-parallel-size 2",
            id="59-expert-tensor-ranks",
        ),
        pytest.param(QWEN3_4B, "--tensor-model-parallel-size 0", 1, "0 must be at least 1", id="59-zero"),
        pytest.param(
            QWEN3_4B | {"intermediate_size": 9732, "num_key_value_heads": 2},
            "--tensor-model-parallel-size 6",
            6,
            "must divide the 32 attention heads",
            id="59-heads",
        ),
        pytest.param(
            QWEN3_4B | {"intermediate_size": 9729}, _TP2, 2, "must divide the 9729 columns of the MLP", id="59-mlp"
        ),
        pytest.param(
            QWEN3_4B | {"num_key_value_heads": 2, "num_attention_heads": 30, "intermediate_size": 9729},
            "--tensor-model-parallel-size 3",
            3,
            "must divide the 2 key heads",
            id="59-key-heads",
        ),
        pytest.param(QWEN3_30B, _TP2, 2, "with experts needs --sequence-parallel", id="59-experts-sequence"),
        pytest.param(QWEN3_4B, "--pipeline-model-parallel-size 5", 5, "does not divide the 36 layers", id="62-layers"),
        pytest.param(
            QWEN3_4B | {"num_hidden_layers": 2}, _PP4, 4, "exceeds the 2 layers of the model", id="62-more-stages"
        ),
        pytest.param(
            QWEN3_4B,
            f"{_PP4} --decoder-first-pipeline-num-layers 10",
            4,
            "10 and --decoder-last-pipeline-num-layers None leave 26 of 36 layers for 3 other stages",
            id="62-uneven",
        ),
        pytest.param(
            QWEN3_4B,
            "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 9 "
            "--decoder-last-pipeline-num-layers 9",
            2,
            "leave 18 of 36 layers for 0 other stages",
            id="62-two-stages",
        ),
        pytest.param(
            QWEN3_4B, f"{_PP4} --account-for-loss-in-pipeline-split", 4, "does not divide the 37", id="62-loss-counts"
        ),
        pytest.param(
            QWEN3_4B, "--num-virtual-stages-per-pipeline-rank 2", 1, "needs --pipeline-model-parallel", id="62-virtual"
        ),
        pytest.param(
            QWEN3_4B,
            f"{_PP4} --num-virtual-stages-per-pipeline-rank 2",
            4,
            "a stage of 9 layers cannot be cut into 2 chunks",
            id="62-virtual-stages",
        ),
        pytest.param(
            QWEN3_4B,
            f"{_PP4} --num-layers-per-virtual-pipeline-stage 2",
            4,
            "a stage of 9 layers cannot be cut into chunks of 2 layers",
            id="62-virtual-layers",
        ),
        pytest.param(
            QWEN3_4B,
            f"{_PP4} --num-layers-per-virtual-pipeline-stage 3 --num-virtual-stages-per-pipeline-rank 3",
            4,
            "say the same twice",
            id="62-virtual-twice",
        ),
        pytest.param(
            QWEN3_4B,
            f"{_PP4} --decoder-first-pipeline-num-layers 6 --num-layers-per-virtual-pipeline-stage 2",
            4,
            "needs stages of equal size",
            id="62-virtual-uneven",
        ),
        pytest.param(
            QWEN3_4B,
            "--context-parallel-size 3",
            3,
            "--seq-length 4096 must be a multiple of 2 x --context-parallel-size 3",
            id="64-context",
        ),
        pytest.param(
            QWEN3_4B, "--recompute-granularity full --recompute-method block", 1, "num-layers N", id="65-layers"
        ),
        pytest.param(QWEN3_4B, "--recompute-method uniform", 1, "needs --recompute-granularity full", id="65-method"),
        pytest.param(
            QWEN3_4B,
            "--recompute-activations --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            1,
            "means --recompute-granularity selective, but full is given",
            id="65-both",
        ),
        pytest.param(QWEN3_4B, "--optimizer-cpu-offload", 1, "needs --use-precision-aware-optimizer", id="66-offload"),
        pytest.param(
            QWEN3_4B, "--decoder-last-pipeline-num-layers 5", 1, "needs --pipeline-model-parallel-size", id="69-stage"
        ),
        pytest.param(QWEN3_4B, "--lr-warmup-fraction 1.0", 1, "at least 0 and below 1", id="warm-up"),
        pytest.param(QWEN3_4B, "--enable-mtp-training", 1, "needs --mtp-num-layers N", id="mtp"),
        pytest.param(
            QWEN3_4B,
            "--only-train-params-name-list a --freeze-params-name-list b",
            1,
            "exclude each other: give one",
            id="frozen-and-trained",
        ),
        pytest.param(
            QWEN3_4B, "--lr-warmup-fraction 0.1 --lr-warmup-iters 3", 1, "exclude each other", id="two-warm-ups"
        ),
        pytest.param(QWEN3_4B, "--lr 1e-6 --min-lr 1e-5", 1, "--min-lr 1e-05 must not exceed --lr 1e-06", id="min-lr"),
        pytest.param(QWEN3_4B, "--lr-warmup-init 1e-5", 1, "must be between 0 and --lr 1e-06", id="warm-up-init"),
        pytest.param(QWEN3_4B, "--lr-decay-style WSD", 1, "needs --lr-wsd-decay-iters N", id="wsd-steps"),
        pytest.param(QWEN3_4B, "--lr-wsd-decay-iters 5", 1, "needs --lr-decay-style WSD", id="wsd-style"),
        pytest.param(
            QWEN3_4B,
            "--use-checkpoint-opt-param-scheduler --override-opt_param-scheduler",
            1,
            "exclude each other",
            id="two-schedules",
        ),
        pytest.param(QWEN3_4B, "--end-weight-decay 0.1", 1, "--weight-decay for one that stays", id="decay-stays"),
        pytest.param(
            QWEN3_4B, "--weight-decay-incr-style linear", 1, "needs --start-weight-decay and", id="decay-from-where"
        ),
        pytest.param(
            QWEN3_4B,
            "--weight-decay-incr-style linear --start-weight-decay 0.2 --end-weight-decay 0.1",
            1,
            "at most --end-weight-decay 0.1",
            id="decay-falls",
        ),
        pytest.param(
            QWEN3_4B, "--optimizer sgd --use-distributed-optimizer", 1, "with --optimizer adam only", id="sgd"
        ),
        pytest.param(QWEN3_30B, "--moe-aux-loss-coeff 0.01", 1, "0.01 is not supported yet", id="balancing"),
        pytest.param(
            QWEN3_30B, "--moe-router-load-balancing-type sinkhorn", 1, "sinkhorn is not supported yet", id="sinkhorn"
        ),
        pytest.param(QWEN3_4B, "--tokenizer-type GPT2BPETokenizer", 1, "use HuggingFaceTokenizer", id="58-tokenizer"),
        pytest.param(
            QWEN3_NEXT_80B,
            "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 16",
            32,
            "2 x --context-parallel-size 16 must divide the 16 key heads of the gated delta nets",
            id="delta-heads",
        ),
        pytest.param(
            QWEN3_NEXT_80B,
            "--tensor-model-parallel-size 4 --sequence-parallel",
            4,
            "4 must not exceed the 2 key heads of .*, whose attention has an output gate",
            id="gated-attention",
        ),
        pytest.param(QWEN3_NEXT_80B, "--optimizer muon", 1, "stand beside output gates", id="gated-muon"),
        pytest.param(QWEN3_4B, "--keep-last-checkpoints 0", 1, "must be at least 1", id="retention"),
    ],
)
def test_a_combination_that_cannot_work_is_named(
    config: dict[str, Any], words: str, world_size: int, message: str, tmp_path: Path
) -> None:
    (problem,) = problems_of(write_config(tmp_path, config), words.split(), world_size=world_size)
    assert re.search(message, problem)
    assert problem.endswith(".")


@pytest.mark.parametrize("value", ["0", "-1", "7"])
@pytest.mark.parametrize("config", [QWEN3_4B, DEEPSEEK_V3], ids=["dense", "latent"])
def test_no_number_breaks_the_derivation(config: dict[str, Any], value: str, tmp_path: Path) -> None:
    hf = write_config(tmp_path, config)
    for flag in flags_of(groups_in(arguments)):
        try:
            args = resolved(hf, [flag.spellings[0], value], world_size=8)
        except ConfigError:
            continue  # not a flag that takes a number
        for rule in RULES:
            assert all(isinstance(problem, str) for problem in rule(args)), flag


def test_latent_attention_on_several_tensor_ranks_needs_sequence_parallelism(tmp_path: Path) -> None:
    problems = problems_of(write_config(tmp_path, DEEPSEEK_V3), _TP2.split(), world_size=2)
    assert [problem for problem in problems if "with latent attention needs --sequence-parallel" in problem]


@pytest.mark.parametrize(
    ("config", "words", "world_size"),
    [
        (QWEN3_4B, f"{_TP2} --sequence-parallel {_PP4} --context-parallel-size 2", 16),
        (QWEN3_4B, f"{_PP4} --num-virtual-stages-per-pipeline-rank 3", 4),
        (QWEN3_4B, f"{_PP4} --decoder-first-pipeline-num-layers 6", 4),
        (QWEN3_4B | {"num_hidden_layers": 61}, f"{_PP4} --decoder-last-pipeline-num-layers 13", 4),
        (QWEN3_4B | {"num_hidden_layers": 34}, _PP4 + " --account-for-embedding-in-pipeline-split "
         "--account-for-loss-in-pipeline-split", 4),
        (QWEN3_30B, f"{_TP2} --sequence-parallel --expert-model-parallel-size 4 --expert-tensor-parallel-size 1", 8),
        (DEEPSEEK_V3, "--tensor-model-parallel-size 8 --sequence-parallel --expert-model-parallel-size 32 "
         "--expert-tensor-parallel-size 1 --pipeline-model-parallel-size 4 --decoder-last-pipeline-num-layers 13", 128),
        (QWEN3_4B, "--tensor-model-parallel-size 16", 16),
        (QWEN3_4B, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", 1),
        (QWEN3_4B, "--recompute-granularity selective --recompute-modules core_attn mlp", 1),
        (QWEN3_30B, "--moe-aux-loss-coeff 0 --moe-router-load-balancing-type seq_aux_loss", 1),
        (QWEN3_4B, "--tokenizer-type HuggingFaceTokenizer --max-position-embeddings 32768 --bf16", 1),
        (GLM4_9B, "--spec slime_plugins.models.glm4 get_glm_spec", 1),
        (QWEN3_NEXT_80B, "--spec slime_plugins.models.qwen3_next get_qwen3_next_spec "
         "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 8", 16),
    ],
)  # fmt: skip
def test_layouts_of_launch_scripts_are_accepted(
    config: dict[str, Any], words: str, world_size: int, tmp_path: Path
) -> None:
    assert problems_of(write_config(tmp_path, config), words.split(), world_size=world_size) == []


@pytest.mark.parametrize(
    ("words", "stages"),
    [
        ("", None),
        (_PP4, None),
        (f"{_PP4} --num-virtual-stages-per-pipeline-rank 3", 3),
        (f"{_PP4} --num-virtual-stages-per-pipeline-rank 1", None),
        (f"{_PP4} --num-layers-per-virtual-pipeline-stage 3", 3),
        (f"{_PP4} --num-layers-per-virtual-pipeline-stage 9", None),
        (f"{_PP4} --num-layers-per-virtual-pipeline-stage 1", 9),
    ],
)
def test_virtual_stages_follow_from_either_flag(words: str, stages: int | None, tmp_path: Path) -> None:
    args = resolved(write_config(tmp_path, QWEN3_4B), words.split(), world_size=4)
    assert args.virtual_pipeline_model_parallel_size == stages
    assert args.microbatch_group_size_per_vp_stage == (None if stages is None else 4)


def test_sequence_parallelism_is_off_with_one_tensor_rank_and_says_so(tmp_path: Path) -> None:
    hf = write_config(tmp_path, QWEN3_4B)
    args = resolved(hf, ["--sequence-parallel"])
    assert args.sequence_parallel is False
    assert [notice.flag for notice in args.notices] == ["--sequence-parallel"]
    assert resolved(hf, ["--sequence-parallel", *_TP2.split()], world_size=2).sequence_parallel is True


def test_derived_values_of_the_trainer(tmp_path: Path) -> None:
    hf = write_config(tmp_path, QWEN3_4B)
    args = resolved(hf, ["--recompute-activations", *_TP2.split(), *_PP4.split()], world_size=16)
    assert args.recompute_granularity == "selective"
    assert (args.bf16, args.accumulate_allreduce_grads_in_fp32) == (True, True)
    assert (args.data_parallel_size, args.expert_tensor_parallel_size) == (2, 2)
    assert (args.variable_seq_lengths, args.moe_token_dispatcher_type) == (True, "alltoall")
    assert args.tokenizer_type == "HuggingFaceTokenizer"
    assert args.use_distributed_optimizer is True
    assert resolved(hf, ["--optimizer", "sgd"]).use_distributed_optimizer is False
    assert resolved(hf, ["--fp16"]).bf16 is False
    assert resolved(hf, ["--fp32"]).accumulate_allreduce_grads_in_fp32 is False


def test_the_bias_of_the_router_stays_unless_asked_and_that_is_told(tmp_path: Path) -> None:
    hf = write_config(tmp_path, DEEPSEEK_V3)
    args = resolved(hf, [])
    assert args.moe_router_bias_update_rate == 0.0
    assert [notice.flag for notice in args.notices] == ["--moe-router-bias-update-rate"]
    assert resolved(hf, ["--moe-router-bias-update-rate", "0.001"]).moe_router_bias_update_rate == 0.001
    assert resolved(hf, ["--moe-router-bias-update-rate", "0"]).notices == []


@pytest.mark.parametrize(
    ("words", "flag", "missing"),
    [
        ("--moe-token-dispatcher-type flex", "--moe-token-dispatcher-type", "--transformer-impl transformer_engine"),
        (
            "--moe-token-dispatcher-type flex --moe-enable-deepep",
            "--moe-enable-deepep",
            "--transformer-impl transformer_engine",
        ),
        (
            "--moe-enable-deepep --transformer-impl transformer_engine",
            "--moe-enable-deepep",
            "--moe-token-dispatcher-type flex",
        ),
    ],
)
def test_a_dispatcher_that_is_missing_is_replaced_with_a_warning(
    words: str, flag: str, missing: str, tmp_path: Path
) -> None:
    args = resolved(write_config(tmp_path, QWEN3_30B), words.split())
    assert args.moe_token_dispatcher_type == "alltoall"
    (notice,) = [notice for notice in args.notices if notice.level == "warning"]
    assert notice.flag == flag
    assert notice.text.startswith(f"no effect without {missing}: tokens reach the experts by all-to-all over NCCL.")


@pytest.mark.parametrize(
    ("words", "attention"),
    [
        ("", "attention"),
        ("--context-parallel-size 2", "attention"),
        ("--attention-backend fused", "attention"),
        ("--attention-backend fa3", "with the attention of local layers"),
        ("--deterministic-mode", "with the attention of local layers"),
        ("--fp32", "with the attention of local layers"),
    ],
)
def test_the_plan_states_which_layers_are_transformer_engines(words: str, attention: str, tmp_path: Path) -> None:
    given = ["--transformer-impl", "transformer_engine", *words.split()]
    (notice,) = resolved(write_config(tmp_path, QWEN3_4B), given, world_size=2).notices
    assert notice.flag == "--transformer-impl"
    assert notice.text == (
        f"layers of Transformer Engine: linear layers joined with norms, grouped experts, {attention}."
    )


@pytest.mark.parametrize("engine", ["--transformer-impl transformer_engine", "--fp8-format hybrid"])
def test_the_flex_dispatcher_is_that_of_transformer_engines_layers(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf = write_config(tmp_path, QWEN3_30B)
    words = f"{engine} --moe-token-dispatcher-type flex --moe-enable-deepep --expert-model-parallel-size 4".split()
    args = resolved(hf, words, world_size=4)
    assert args.moe_token_dispatcher_type == "flex"
    (notice,) = args.notices
    assert (notice.level, notice.flag) == ("info", engine.split(maxsplit=1)[0])
    assert problems_of(hf, words, world_size=4) == []
    monkeypatch.setattr(accelerator, "current", lambda: SimpleNamespace(is_cpu=False))
    *_, problem = low_precision_here(args)
    assert "needs the package deep_ep" in problem
    assert problem.endswith("Give --moe-token-dispatcher-type alltoall to exchange tokens over NCCL.")
    monkeypatch.undo()
    (problem,) = problems_of(hf, words[:-2])
    assert problem.startswith("--moe-token-dispatcher-type flex needs several ranks of experts")


def test_the_tokenizer_of_the_checkpoint_may_be_spelled_out(tmp_path: Path) -> None:
    hf = write_config(tmp_path, QWEN3_4B)
    assert problems_of(hf, ["--tokenizer-model", hf + "/"]) == []
    assert resolved(hf, []).tokenizer_model == hf
    (problem,) = problems_of(hf, ["--tokenizer-model", "/elsewhere"])
    assert problem.startswith("--tokenizer-model /elsewhere is not supported yet")


def test_rules_and_steps_have_names_that_a_traceback_can_show() -> None:
    assert len({rule.__name__ for rule in RULES}) == len(RULES)
    assert len({step.__name__ for step in STEPS}) == len(STEPS)
