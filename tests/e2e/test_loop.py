"""The real stack, end to end: Ray, megatron-core, SGLang and its router, on a CPU."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.doc_commands import shown_flags
from tests.e2e.running import (
    PLUGINS,
    Finished,
    exit_status,
    kill_marked,
    marked,
    metrics,
    run_train,
    start_train,
    values,
)
from tests.limits import Limit


def grpo_flags(task, output: Path, *more: Any) -> list[Any]:
    return [
        *("--hf-checkpoint", task.model, "--prompt-data", task.train, "--label-key", "label", "--apply-chat-template"),
        *("--rollout-batch-size", 16, "--n-samples-per-prompt", 8, "--rollout-max-response-len", 8),
        *("--rollout-shuffle", "--custom-rm-path", f"{PLUGINS}:share_of_sevens"),
        *("--fp32", "--use-dynamic-batch-size", "--max-tokens-per-gpu", 4096),
        *("--actor-num-gpus-per-node", 2, "--rollout-num-gpus", 1),
        *("--sglang-context-length", 128, "--sglang-max-total-tokens", 16384),
        *("--lr", "2e-3", "--min-lr", "2e-3", "--use-kl-loss", "--kl-loss-coef", 0.001, "--kl-loss-type", "k3"),
        *("--output-dir", output, "--experiment-name", "run"),
        *more,
    ]


@pytest.fixture(scope="module")
def resumed_run(tiny_task, tmp_path_factory):
    """Five rollouts, then the same command for eight, which continues from the first one's checkpoint, and again."""
    output = tmp_path_factory.mktemp("loop")
    (output / "data").mkdir()
    for name in ("gsm8k", "math"):
        rows = Path(tiny_task.eval).read_text().splitlines(keepends=True)
        (output / "data" / f"{name}.jsonl").write_text("".join(rows[:6]))
    flags = shown_flags("README.md", "--rm-type math") + grpo_flags(
        *(tiny_task, output, "--check-weight-update-equal", "--save", output / "checkpoints", "--save-interval", 5),
        *("--load", output / "checkpoints", "--save-debug-rollout-data", output / "dump" / "{rollout_id}.pt"),
        *("--save-hf", output / "hf_{rollout_id}", *shown_flags("docs/reproducibility.md", "--ci-save-grad-norm")),
        *shown_flags("docs/evaluation.md", "--eval-interval"),
    )
    first = run_train([*flags, "--num-rollout", 5], output)
    assert first.status == 0, first.output[-4000:]
    second = run_train([*flags, "--num-rollout", 8], output)
    assert second.status == 0, second.output[-4000:]
    third = run_train([*flags, "--num-rollout", 8], output)
    return output, first, second, third


def test_redirected_output_has_a_line_per_rollout_and_a_summary(resumed_run):
    output, first, second, _ = resumed_run
    for run, numbers in ((first, ["0/5", "1/5", "2/5", "3/5", "4/5"]), (second, ["5/8", "6/8", "7/8"])):
        lines = run.terminal.splitlines()
        rows = [line for line in lines if re.match(r" +\d+/\d ", line)]
        (titles,) = [line for line in lines if line.split()[:2] == ["rollout", "reward"]]
        assert [row.split()[0] for row in rows] == numbers, run.terminal
        assert {len(row) for row in rows} == {len(titles)}
        assert titles.split()[:6] == ["rollout", "reward", "eval", "len", "trunc", "useful"]
        places = [line for line in lines if str(output) in line or line.startswith(("--", "warning: "))]
        assert max(len(line) for line in lines if line not in places) <= 100, run.terminal
        assert lines[-1].endswith("slime board run")
        assert any(line.startswith(f"finished {len(rows)} rollouts in ") for line in lines)
        assert any("     e.g. " in line for line in lines), "one of the samples"
        assert any(line.startswith("     saved ") for line in lines)
        assert "\x1b" not in run.terminal
        assert "pid=" not in run.terminal
        assert "trainer ready" not in run.terminal
    log = (output / "run" / "run.log").read_text()
    assert log.count("trainer ready") == 2, "the first rank of two runs"
    assert "\x1b" not in log


def test_a_run_leaves_no_temporary_file(resumed_run):
    _, first, second, third = resumed_run
    assert (first.left, second.left, third.left) == ([], [], [])


def test_the_reward_rises(resumed_run):
    output, *_ = resumed_run
    rewards = values(metrics(output / "run"), "rollout/raw_reward")
    assert len(rewards) == 8
    assert sum(rewards[-2:]) / 2 > rewards[0] + 0.15, rewards


def test_trainer_and_engine_agree_on_every_token_of_every_step(resumed_run):
    output, *_ = resumed_run
    differences = values(metrics(output / "run"), "train/train_rollout_logprob_abs_diff")
    assert len(differences) == 8
    assert 0 < max(differences) < 1e-4, differences


def test_the_second_command_continues_where_the_first_ended(resumed_run):
    output, *_ = resumed_run
    assert values(metrics(output / "run"), "rollout/step") == list(range(8))
    assert (output / "checkpoints" / "latest_checkpointed_iteration.txt").read_text().strip() == "7"


def test_every_set_is_evaluated_before_the_first_rollout_and_after_the_last(resumed_run):
    output, *_ = resumed_run
    rows = metrics(output / "run")
    assert values(rows, "eval/step") == [0, 5, 8]
    for name in ("eval/gsm8k", "eval/math", "eval/gsm8k-pass@4"):
        assert len(values(rows, name)) == 3, name


def test_the_command_of_a_finished_run_starts_nothing(resumed_run):
    *_, third = resumed_run
    assert third.status == 0, third.output[-4000:]
    assert third.terminal.strip().splitlines()[-1].startswith("warning: --num-rollout: 8: "), third.terminal
    assert "nothing is left to train" in third.terminal
    assert "Ray" not in third.terminal


def test_no_prompt_is_drawn_twice_across_a_resume(resumed_run):
    import torch

    output, *_ = resumed_run
    dumps = [torch.load(output / "dump" / f"{i}.pt", weights_only=True)["samples"] for i in range(8)]
    groups = [sorted({sample["group_index"] for sample in dump}) for dump in dumps]
    assert [index for group in groups for index in group] == list(range(8 * 16))


def test_no_process_is_left_after_a_run(resumed_run):
    _, first, second, _ = resumed_run
    assert first.survivors() == []
    assert second.survivors() == []


def test_the_exported_checkpoint_loads_in_transformers(resumed_run):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    output, *_ = resumed_run
    model = AutoModelForCausalLM.from_pretrained(output / "hf_7", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(output / "hf_7")
    dump = torch.load(output / "dump" / "7.pt", weights_only=True)["samples"]
    ids = torch.tensor([tokenizer.encode(dump[0]["prompt"], add_special_tokens=False)])
    answer = tokenizer.decode(model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :])
    assert "7" in answer, "a model that was rewarded for sevens answers with one"


def test_another_layout_computes_the_same_losses_from_the_same_rollouts(resumed_run, tiny_task, tmp_path):
    """Two ranks that share each sequence, instead of two that share the samples."""
    output, *_ = resumed_run
    flags = grpo_flags(tiny_task, tmp_path, "--load-debug-rollout-data", output / "dump" / "{rollout_id}.pt")
    flags += ["--num-rollout", 3, "--context-parallel-size", 2]
    result = run_train([*flags, *shown_flags("docs/reproducibility.md", "--ci-load-grad-norm")], output)
    assert result.status == 0, result.output[-4000:]
    one, two = metrics(tmp_path / "run"), metrics(output / "run")
    for name in ("train/loss", "train/grad_norm", "train/kl_loss"):
        assert len(values(one, name)) == 3
        assert values(one, name) == pytest.approx(values(two, name)[:3], rel=1e-4, abs=2e-6), name


def test_a_reward_that_hangs_ends_the_run_at_its_deadline_and_leaves_nothing(tiny_task, tmp_path):
    flags = grpo_flags(tiny_task, tmp_path, "--num-rollout", 1, "--debug-rollout-only", "--rm-timeout", 3)
    flags += ["--custom-rm-path", f"{PLUGINS}:hanging_reward"]
    result = run_train(flags, tmp_path)
    last_line = result.output.strip().splitlines()[-1]
    assert result.status == 1, result.output[-4000:]
    assert "--rm-timeout" in result.output
    assert "hanging_reward" in last_line, last_line
    assert result.survivors() == []


def test_a_run_outlives_answers_that_cannot_be_graded_and_functions_that_exit_but_not_its_process(tiny_task, tmp_path):
    flags = grpo_flags(tiny_task, tmp_path, "--num-rollout", 2, "--rm-type", "math", "--rm-timeout", 20)
    flags += ["--custom-generate-function-path", f"{PLUGINS}:hostile_answers", "--debug-rollout-only"]
    reward = flags.index("--custom-rm-path")
    result = run_train(flags[:reward] + flags[reward + 2 :], tmp_path)
    rows = metrics(tmp_path / "run")
    assert values(rows, "rollout/failed_samples") == [1], result.output[-4000:]
    assert values(rows, "rollout/ungraded_answers") == [1]
    assert result.status == 1, result.output[-4000:]
    assert re.search(
        r"the rollout manager \(pid \d+.*\) died while the driver .*it ended without a trace", result.output
    )
    assert "os._exit" in result.output
    assert result.survivors() == []


def wait_for_training(process, run: Path, log: Path) -> None:
    limit = Limit(120)
    while not (run / "metrics.jsonl").exists() or not values(metrics(run), "train/loss"):
        assert process.poll() is None, log.read_text()[-4000:]
        assert not limit.is_over, log.read_text()[-4000:]
        time.sleep(0.2)


def test_an_engine_that_dies_during_a_run_ends_it_with_the_cause(tiny_task, tmp_path):
    log = tmp_path / "log"
    process, mark = start_train(grpo_flags(tiny_task, tmp_path, "--num-rollout", 500), tmp_path, log)
    try:
        wait_for_training(process, tmp_path / "run", log)
        engine = next(pid for pid, command in marked(mark) if "sglang::schedul" in command)
        assert process.pid not in {one.pid for one in psutil.Process(engine).parents()}, "the imports are shared (warm)"
        assert kill_marked(mark, "sglang::schedul") == 1
        assert exit_status(process, log) == 1, log.read_text()[-4000:]
        assert "error: engine 0" in log.read_text().strip()
        assert Finished(1, "", mark).survivors() == []
    finally:
        process.kill()
