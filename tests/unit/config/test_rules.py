"""Every rule of the command line that can be judged before anything starts: a bad value and the message it gets.

The number in front is the rule's in the contract of the command line: 1-46 slime's own, 47-50 the parser's, 51-69 the
model's and Megatron's (tests/unit/megatron_utils), 70-74 the engine's (tests/unit/sglang_utils), 75-94 those that older
versions found out at run time. D is a decision that keeps older launch scripts working, A a failure mode.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import pytest

from slime.config.parse import build_parser
from slime.ray.arguments import GROUPS
from tests.unit.config.tiny_command import TinyCommand


@dataclass(frozen=True)
class Case:
    """``flags`` added to a good command, without the flags ``without``: ``message`` must be among the problems."""

    rule: str
    flags: str
    message: str
    without: tuple[str, ...] = ()
    is_async: bool = False


def case(rule: str, flags: str, message: str, *without: str, is_async: bool = False) -> Case:
    return Case(rule, flags, message, without, is_async)


_DISK = "--update-weight-transport disk --update-weight-disk-dir {dir}"

ERRORS = [
    case("1", "--eval-prompt-data a x.jsonl b", "--eval-prompt-data takes pairs NAME FILE, but got 3 values"),
    case(
        "1-D2", "--eval-prompt-data a {dir}/prompts.jsonl --eval-prompt-data a {dir}/prompts.jsonl", "names a more than"
    ),
    case("2", "--rollout-temperature 0", "--rollout-temperature 0.0 must be above 0"),
    case(
        "3", "--use-kl-loss --ref-load /nowhere", "--ref-load /nowhere: there is no such directory, and --use-kl-loss"
    ),
    case(
        "3-coef", "--kl-coef 0.1 --ref-load /nowhere", "there is no such directory, and --kl-coef 0.1 needs a reference"
    ),
    case("4", "--use-opd", "--use-opd needs --opd-type"),
    case("5", "--use-opd --opd-type megatron", "--opd-type megatron needs --opd-teacher-load DIR"),
    case(
        "6",
        "--use-opd --opd-type megatron --opd-teacher-load /nowhere",
        "--opd-teacher-load /nowhere: there is no such",
    ),
    case("7", "--use-opd --opd-type sglang --opd-teacher-load {dir}", "--opd-teacher-load is for --opd-type megatron"),
    case("8", "--opd-teacher-load {dir}", "--opd-teacher-load needs --use-opd"),
    case("9-A10", "--load {dir}", "holds neither latest_checkpointed_iteration.txt (Megatron) nor config.json"),
    case("9-typo", "--load /nowhere", "--load /nowhere: there is no such directory"),
    case("10-strict", "--eval-interval 5 --strict-args", "--eval-interval 5: without --eval-prompt-data"),
    case("11-strict", "--save-interval 5 --strict-args", "--save: not given, but --save-interval is"),
    case("12", "--kl-coef 0.1 --kl-loss-coef 0.1", "--kl-coef 0.1 and --kl-loss-coef 0.1 would count"),
    case("13", "--advantage-estimator reinforce_plus_plus", "reinforce_plus_plus needs --normalize-advantages"),
    case("13-base", "--advantage-estimator reinforce_plus_plus_baseline", "_baseline needs --normalize-advantages"),
    case("14", "--use-rollout-logprobs --use-tis", "--use-rollout-logprobs and --use-tis exclude each other"),
    case("15", "--get-mismatch-metrics", "--get-mismatch-metrics needs --custom-tis-function-path"),
    case("16", "--use-dynamic-batch-size", "--use-dynamic-batch-size needs --max-tokens-per-gpu N with N above 0"),
    case(
        "17", "--balance-by-flops", "--balance-by-flops forms dynamic micro-batches: it needs --use-dynamic-batch-size"
    ),
    case("A-prefixes", "--share-prefixes --context-parallel-size 2", "--context-parallel-size 2 cuts every sequence"),
    case("A-prefixes-loss", "--share-prefixes --loss-type custom_loss", "--loss-type custom_loss reads the logits of"),
    case("A-prefixes-dropout", "--share-prefixes --hidden-dropout 0.1", "--hidden-dropout 0.1 differs from sample to"),
    case(
        "A-prefixes-lora",
        "--share-prefixes --lora-rank 4 --lora-dropout 0.1",
        "--lora-dropout 0.1 differs from sample to sample. Drop one of them",
    ),
    case(
        "A-prefixes-strict",
        "--share-prefixes --strict-args",
        "--share-prefixes: no effect on micro-batches of one sample: --use-dynamic-batch-size",
    ),
    case(
        "A-longest-strict",
        "--rollout-longest-first --strict-args "
        "--rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async",
        "--rollout-longest-first: no effect on --rollout-function-path slime.rollout.fully_async_rollout.",
        is_async=True,
    ),
    case("A-masks-strict", "--loss-mask-type qwen3 --strict-args", "--loss-mask-type: no effect on --rollout-function"),
    case("A-schedule-strict", "--replay-schedule s.jsonl --strict-args", "--replay-schedule: no effect on --rollout-"),
    case("A-prefixes-spec", "--share-prefixes --spec mine.py:layers", "--spec mine.py:layers has an attention that"),
    case("19-strict", "--advantage-estimator cispo --strict-args", "--eps-clip 0.2: cispo cuts off small ratios too"),
    case("22", "--save-debug-rollout-data {dir}/x --save-debug-train-data {dir}/x", "are the same file"),
    case(
        "28",
        "--debug-rollout-only --debug-train-only",
        "--debug-rollout-only and --debug-train-only exclude each other",
    ),
    case(
        "28-23", "--debug-rollout-only --load-debug-rollout-data x", "and --load-debug-rollout-data exclude each other"
    ),
    case(
        "34", "--num-steps-per-rollout 2 --global-batch-size 12", "must equal --global-batch-size 12 x --num-steps-per-"
    ),
    case("34-A27", "--num-steps-per-rollout 33", "--num-steps-per-rollout 33 is more than the samples of a rollout"),
    case("34-A29", "--global-batch-size 64", "= 32 samples per rollout do not fill one step of --global-batch-size 64"),
    case("34-strict", "--global-batch-size 12 --strict-args", "the last 8 samples of every rollout do not fill a step"),
    case("36", "--over-sampling-batch-size 7", "--over-sampling-batch-size 7 must be at least --rollout-batch-size 8"),
    case("37", "--disable-rollout-global-dataset", "--num-rollout N is required with --disable-roll", "--num-rollout"),
    case("37-epoch", "--disable-rollout-global-dataset --num-epoch 2", "--num-epoch 2 counts passes", "--num-rollout"),
    case("37-A22", "--num-epoch 2 --strict-args", "--num-epoch: ignored, because --num-rollout 2 decides"),
    case("40", "--custom-config-path /nowhere.yaml", "--custom-config-path /nowhere.yaml: there is no such file"),
    case("42", "--rollout-max-context-len 16 --rollout-max-prompt-len 16", "--rollout-max-prompt-len 16 must be below"),
    case("44", "--update-weight-transport disk", "--update-weight-transport disk needs --update-weight-disk-dir DIR"),
    case("45-critic", "--release-train --advantage-estimator ppo", "--release-train does not work with a critic"),
    case("45-old", "--release-train --keep-old-actor", "drop --keep-old-actor"),
    case("45-save", "--release-train", "--release-train starts every step from a checkpoint: it needs --save DIR"),
    case(
        "45-sync",
        "--release-train",
        "--release-train needs --update-weight-mode full and --update-weight-transport disk",
    ),
    case("45-fsdp", "--release-train --train-backend fsdp", "--release-train works with --train-backend megatron only"),
    case("46-nccl", "--update-weight-mode delta", "--update-weight-mode delta needs --update-weight-transport disk"),
    case("46-colocate", f"--update-weight-mode delta {_DISK} --colocate", "delta does not work with --colocate"),
    case("46-local", f"--update-weight-mode delta {_DISK}", "needs --update-weight-local-checkpoint-dir DIR"),
    case("47-group", "--strict-args", "--n-samples-per-prompt: not given: 8 responses", "--n-samples-per-prompt"),
    case("47-D24", "--strict-args", "--rollout-batch-size: not given: 32 prompts", "--rollout-batch-size"),
    case("48", "--kl-loss-type k9", "invalid choice: 'k9'"),
    case("48-rm", "--rm-type mth", "--rm-type mth is unknown. Use one of"),
    case(
        "49-A1",
        "--rollout-batchsize 3 --strict-args",
        "unknown flag, ignored with its values; did you mean --rollout-batch-s",
    ),
    case(
        "misspelled",
        "--promt-data x.jsonl",
        "--promt-data: unknown flag, ignored with its values; did you mean --prompt-",
        "--prompt-data",
    ),
    case("61-D11", "--save {dir}/out", "--save needs --save-interval N"),
    case("75-offload", "--offload-rollout", "--offload-rollout does not work with train_async.py", is_async=True),
    case("75-D22", "--colocate", "--colocate does not work with train_async.py", is_async=True),
    case("77-A13-strict", "--strict-args", "--rollout-num-gpus: not given: 2 devices", "--rollout-num-gpus"),
    case("79", "--prompt-data /nowhere.jsonl", "--prompt-data /nowhere.jsonl: there is no such file"),
    case("79-kind", "--prompt-data {dir}/model/config.json", "prompt files must end in .jsonl or .parquet"),
    case("79-none", "", "--prompt-data is required", "--prompt-data"),
    case(
        "80-strict", "--strict-args", "--rollout-max-response-len: not given: 1024 tokens", "--rollout-max-response-len"
    ),
    case("81-D12", "--label-key nothing", "--rm-type is required: the first row of --prompt-data", "--rm-type"),
    case("83", "--rollout-top-p 1.5", "--rollout-top-p 1.5 must be above 0 and at most 1"),
    case("83-k", "--rollout-top-k 5000", "--rollout-top-k 5000 must be -1 (all) or from 2 to 4096"),
    case(
        "83-most",
        "--rollout-top-p 0.9 --sglang-sampling-mask-max-tokens 100",
        "--sglang-sampling-mask-max-tokens 100 must be 4096 or more with --rollout-top-p",
    ),
    case(
        "83-draft",
        "--rollout-top-k 20 --sglang-speculative-algorithm EAGLE",
        "--rollout-top-k and --sglang-speculative-algorithm EAGLE exclude each other",
    ),
    case("84", "--eps-clip-c 1", "--eps-clip-c 1.0 must be above 1"),
    case(
        "85",
        "--rollout-batch-size 1 --n-samples-per-prompt 2 --actor-num-gpus-per-node 4",
        "less than the 4 data-parallel",
    ),
    case("85-micro", "--micro-batch-size 3", "--global-batch-size 32 must be a multiple of --micro-batch-size 3 x 2"),
    case("86", "--use-stateless-adam --optimizer sgd", "--use-stateless-adam needs --optimizer adam, not sgd"),
    case("86-save", "--use-stateless-adam", "it needs --no-save-optim"),
    case("90", "--memory-recorder memray", "--memory-recorder memray needs --memory-snapshot-num-steps N"),
    case("A7-eval", "--eval-prompt-data a /nowhere.jsonl", "--eval-prompt-data /nowhere.jsonl: there is no such file"),
    case("A14", "--rollout-num-gpus 3 --rollout-num-gpus-per-engine 2", "--rollout-num-gpus 3 must be a multiple of"),
    case(
        "A15",
        "--rollout-num-gpus 12 --rollout-num-gpus-per-engine 12",
        "--rollout-num-gpus-per-engine 12 is more than --num",
    ),
    case(
        "A14-border",
        "--rollout-num-gpus 16 --rollout-num-gpus-per-engine 16",
        "would begin in the middle of one (--num-gpus-per-node 8): give the trainer whole nodes",
    ),
    case("A24-save", "--save-interval 0", "--save-interval 0 must be at least 1"),
    case("A24-eval", "--eval-interval 0", "--eval-interval 0 must be at least 1"),
    case("A24-sync", "--update-weights-interval 0", "--update-weights-interval 0 must be at least 1"),
    case("A33", "--n-samples-per-prompt 1", "--n-samples-per-prompt 1 makes every group-relative advantage zero"),
    case("A43", "--custom-rm-path nowhere.module.f", "--custom-rm-path nowhere.module.f: module 'nowhere.module'"),
    case("C-async", "--async-buffer-size -1", "--async-buffer-size -1 must be 0 or more", is_async=True),
    case("C-sync", "--async-buffer-size 4 --strict-args", "--async-buffer-size 4: no effect: only train_async.py"),
    case(
        "C-initial",
        "--initial-megatron-checkpoint /nowhere",
        "--initial-megatron-checkpoint /nowhere: there is no such",
    ),
    case("C-turns", "--max-turns 0", "--max-turns 0 must be at least 1"),
    case("C-stream", "--streaming-data --num-epoch 1", "--streaming-data does not know the length", "--num-rollout"),
    case(
        "C-tis",
        "--tis-threshold 0.9 --tis-clip 2.5",
        "--tis-threshold 0.9 and --tis-clip 2.5 are two names of one bound",
    ),
    case("C-policy-async", "--true-on-policy-mode", "does not work with train_async.py", is_async=True),
    case("C-policy-sync", "--true-on-policy-mode --update-weights-interval 2", "--update-weights-interval 2 must be 1"),
    case("C-policy-steps", "--true-on-policy-mode --num-steps-per-rollout 2", "--num-steps-per-rollout 2 must be 1"),
    case("C-policy-partial", "--true-on-policy-mode --partial-rollout", "--partial-rollout is not possible"),
    case("C-policy-tis", "--true-on-policy-mode --use-tis", "--use-tis is not possible"),
    case("custom-loss", "--loss-type custom_loss", "--loss-type custom_loss needs --custom-loss-function-path"),
    case("kl-coef-grpo", "--kl-coef 0.1 --strict-args", "--kl-coef: 0.1 has no effect with"),
    case("remote-rm", "--rm-type remote_rm", "--rm-type remote_rm needs --rm-url"),
    case("template", "--save-debug-rollout-data {dir}/{step}.pt", "only {rollout_id} can be replaced"),
    case("subsample", "--load-debug-rollout-data-subsample 2", "2.0 is a share: above 0, at most 1"),
    case("precision", "--bf16 --fp16", "--bf16, --fp16 and --fp32 exclude each other"),
    case("kl-kind-strict", "--use-kl-loss --kl-loss-coef 0.1 --strict-args", "--kl-loss-type: not given: k1"),
    case(
        "overwrite-strict",
        "--save-debug-rollout-data {dir}/x.pt --strict-args",
        "every rollout replaces the one before",
    ),
    case("A10-file", "--load {dir}/prompts.jsonl", "/prompts.jsonl is a file: name the directory of a checkpoint"),
    case(
        "A23",
        "--num-epoch 2",
        "holds 4 rows, fewer than --rollout-batch-size 8: an epoch (--num-epoch 2) would have no",
        "--num-rollout",
    ),
    case("D3-label", "--label-key answer", "there is no 'answer' (--label-key) in this row; its keys are 'prompt', "),
    case("D4-input", "--input-key question", "--prompt-data: {dir}/prompts.jsonl:1: there is no 'question' (--input-k"),
    case("D4-eval", "--eval-prompt-data a {dir}/prompts.jsonl --eval-input-key q", "evaluation set a: {dir}/prompts.j"),
    case("context", "--sglang-context-length 1", "--sglang-context-length 1 must be at least 2"),
    case(
        "context-cap",
        "--sglang-context-length 16 --rollout-max-context-len 32",
        "--rollout-max-context-len 32 is more than the engines accept, --sglang-context-length 16",
    ),
    case("output-file", "--output-dir {dir}/prompts.jsonl", "/prompts.jsonl is a file, but this is to be a directory"),
    case(
        "output-below-file",
        "--save-hf {dir}/prompts.jsonl/{rollout_id} --save-interval 1",
        "{dir}/prompts.jsonl is a file, but this is to be a directory",
    ),
    case("replay", "--load-debug-rollout-data {dir}/{rollout_id}.pt", "there is no file {dir}/0.pt, with which the"),
    case("replay-template", "--load-debug-rollout-data {dir}/{x}.pt", "only {rollout_id} can be replaced"),
    case("train-template", "--save-debug-train-data {dir}/{x}.pt", "only {rollout_id} and {rank} can be replaced"),
    case("empty-path", "--load=", "--load is empty: leave it out, or set the variable"),
    case("empty-replay", "--load-debug-rollout-data=", "--load-debug-rollout-data is empty"),
    case("not-finite", "--lr nan", "--lr nan must be a finite number"),
    case("no-deadline", "--train-timeout inf", "--train-timeout inf must be a finite number"),
    case("too-large", "--rollout-num-gpus 99999999999999999999", "must be a number below 2^53"),
    case("range-beta", "--adam-beta2 1", "--adam-beta2 1.0 must be at least 0 and below 1"),
    case("range-discount", "--gamma 1.5", "--gamma 1.5 must be between 0 and 1"),
    case("range-seed", "--seed -1", "--seed -1 must be between 0 and 2147483647"),
    case("range-chunk", "--log-probs-chunk-size 0", "--log-probs-chunk-size 0 must be -1 (all at once) or at least 1"),
    case("range-top-p", "--eval-top-p 0", "--eval-top-p 0.0 must be above 0 and at most 1"),
    case("range-budget", "--max-tokens-per-gpu -1", "--max-tokens-per-gpu -1 must be at least 1"),
    case("hub-name", "--hf-checkpoint Qwen/Qwen3-4B", ": hf download Qwen/Qwen3-4B --local-dir Qwen/Qwen3-4B"),
    case("dashes", "-- --lr 3", "'--' is not the value of any flag"),
    case("stray", "stray", "'stray' is not the value of any flag"),
]

NO_ERROR_OF_THE_COMMAND_LINE = {
    18: "derivation", 20: "derivation", 21: "derivation", 23: "derivation", 24: "derivation", 25: "derivation",
    26: "derivation", 27: "derivation", 29: "derivation", 30: "derivation", 31: "derivation", 32: "derivation",
    33: "derivation", 35: "derivation", 39: "derivation", 41: "derivation",
    38: "Megatron's flags", 43: "Megatron's flags",
    50: "argparse itself",
    76: "both loops honour --update-weights-interval", 78: "the engines' file",
    82: "grouped rewards work in evaluation",
    87: "training may start from --hf-checkpoint", 88: "the project is called slime by default",
    89: "the group is the run's name by default", 91: "any numpy works", 92: "the loop", 93: "the loop",
    94: "another entry point",
} | dict.fromkeys(range(51, 70), "model and Megatron") | dict.fromkeys(range(70, 75), "engines")  # fmt: skip


@pytest.mark.parametrize("item", ERRORS, ids=lambda item: item.rule)
def test_a_broken_rule_is_a_message_that_names_flag_value_and_fix(item: Case, command: TinyCommand):
    _, problems = command.run(*item.flags.split(), without=item.without, is_async=item.is_async)
    assert item.message.replace("{dir}", str(command.directory)) in problems


@pytest.mark.parametrize("name", ["eps_clip_high", "eps_clip_c", "tis_clip", "opsm_delta", "value_clip"])
def test_a_bound_may_be_infinite(name: str, command: TinyCommand):
    assert command.run("--" + name.replace("_", "-"), "inf")[1] == ""


@pytest.mark.parametrize(
    "flags",
    [
        "--use-opd --opd-type sglang --rm-url http://teacher",
        "--use-kl-loss --kl-loss-coef 0.1",
        "--entropy-coef 0.1",
        "--num-rollout 0 --eval-interval 1 --eval-prompt-data tiny {dir}/prompts.jsonl",
        "--custom-reward-post-process-path tests.unit.rollout.users_plugins.post_process",
        "--custom-convert-samples-to-train-data-path tests.unit.rollout.users_plugins.convert",
        "--custom-generate-function-path tests.unit.rollout.users_plugins.generate_rows",
        "--rollout-function-path tests.unit.rollout.users_plugins.generate_rollout",
    ],
)
def test_single_samples_are_legal_if_something_else_gives_a_gradient(flags: str, command: TinyCommand):
    assert command.run("--n-samples-per-prompt", 1, *flags.split())[1] == ""


def test_the_good_command_breaks_no_rule(command: TinyCommand):
    assert command.run()[1] == ""
    assert command.warnings() == ""


def test_every_rule_of_the_contract_has_a_case_or_a_reason_to_have_none():
    numbers = {int(item.rule.split("-")[0]) for item in ERRORS if item.rule[0].isdigit()}
    assert numbers | set(NO_ERROR_OF_THE_COMMAND_LINE) == set(range(1, 95))


_LATER = ("--window-size", "7")


def test_all_problems_come_in_one_message(command: TinyCommand):
    _, problems = command.run("--rm-type", "mth", "--rollout-temperature", 0, "--save-interval", 0, *_LATER)
    assert all(
        flag in problems
        for flag in ("--rm-type mth", "--rollout-temperature 0.0", "--save-interval 0", "--window-size [7]")
    )


def test_a_flag_without_its_feature_is_an_error_but_what_is_derived_from_it_is_not_another_one(command: TinyCommand):
    _, problems = command.run(*_LATER)
    assert problems.startswith("--window-size [7] is not supported yet")
    assert problems.count("not supported yet") == 1


def test_engines_with_devices_of_their_own_do_not_need_to_release_memory(command: TinyCommand):
    args, problems = command.run("--offload-rollout")
    assert not problems
    assert "no effect: without --colocate" in next(n.text for n in args.notices if n.flag == "--offload-rollout")


_NUMBERS = [
    action.option_strings[0]
    for action in build_parser(GROUPS)._option_string_actions.values()
    if action.type in (int, float) and action.help != argparse.SUPPRESS and "vocab" not in action.dest
]


@pytest.mark.parametrize("value", ["0", "-1"])
def test_no_number_breaks_a_rule_instead_of_being_judged_by_it(value: str, command: TinyCommand):
    """A rule may divide by what another rule forbids: all problems are still reported."""
    words = [word for flag in dict.fromkeys(_NUMBERS) for word in (flag, value)]
    assert f"--rollout-num-gpus-per-engine {value} must be at least 1" in command.run(*words)[1]
