"""The demo on one machine without a GPU: make a task, warm a model up, then train it with GRPO.

    python examples/demo/run_demo.py --output outputs/demo

1. ``tools/make_tiny_task.py`` makes a tiny Qwen3 and addition problems, without any download.
2. A supervised warm start by ``train.py`` with ``--loss-type sft_loss``, from a teacher who often forgets to carry: the
   model learns the form of an answer, and the teacher's mistake.
3. GRPO from that checkpoint, with real engines and the real router, rewarded for right answers only.
4. A summary, the reward curve, and a Hugging Face checkpoint that ``transformers`` loads and that answers.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.tiny.recipe import ROOT, read_metrics, run_train
from tools.make_tiny_task import TinyTask, make_tiny_task

PARTS = ("task", "warm_start", "grpo", "samples", "hf")


@dataclass(frozen=True)
class Size:
    """Numbers of processes for the machine, and the length of the training."""

    num_engines: int
    num_train_ranks: int
    warm_start_rollouts: int
    grpo_rollouts: int
    eval_interval: int


def size_for(num_cores: int, grpo_rollouts: int, warm_start_rollouts: int) -> Size:
    # Engines and ranks beyond the number of cores only slow each other.
    processes = 2 if num_cores >= 4 else 1
    return Size(
        processes,
        processes,
        warm_start_rollouts=warm_start_rollouts,
        grpo_rollouts=grpo_rollouts,
        eval_interval=max(1, grpo_rollouts // 4),
    )


def warm_start_command(task: TinyTask, size: Size, output: Path) -> list[str]:
    """Supervised fine-tuning through the same train.py: prompts carry the answer, no engine is needed."""
    # A rollout has a fixed cost, so it holds many steps.
    steps_per_rollout = 50
    batch = 128
    return [
        *("--hf-checkpoint", task.model, "--prompt-data", task.sft, "--input-key", "prompt"),
        *("--debug-train-only", "--loss-type", "sft_loss", "--disable-compute-advantages-and-returns"),
        *("--rollout-function-path", "slime.rollout.sft_rollout.generate_rollout", "--loss-mask-type", "qwen3"),
        *("--rollout-shuffle", "--num-rollout", size.warm_start_rollouts),
        *("--rollout-batch-size", batch * steps_per_rollout, "--num-steps-per-rollout", steps_per_rollout),
        *("--actor-num-gpus-per-node", size.num_train_ranks, *precision_and_batching()),
        *("--lr", "1e-3", "--min-lr", "1e-3", "--lr-warmup-iters", 20, "--adam-beta2", 0.95, "--weight-decay", 0.01),
        *("--save", output / "warm_start" / "checkpoints", "--save-interval", size.warm_start_rollouts),
        *("--save-hf", output / "warm_start" / "hf", "--output-dir", output, "--experiment-name", "warm_start"),
    ]


def grpo_command(task: TinyTask, size: Size, output: Path) -> list[str]:
    return [
        *("--hf-checkpoint", output / "warm_start" / "hf", "--prompt-data", task.train, "--label-key", "label"),
        *("--apply-chat-template", "--rollout-shuffle", "--num-rollout", size.grpo_rollouts),
        *("--custom-rm-path", str(ROOT / "examples" / "demo" / "reward.py") + ":reward_func"),
        *("--rollout-batch-size", 64, "--n-samples-per-prompt", 8, "--num-steps-per-rollout", 2),
        *("--rollout-max-response-len", 8, "--rollout-temperature", 1.0),
        *("--advantage-estimator", "grpo", "--eps-clip", 0.2, "--eps-clip-high", 0.28),
        *("--eval-prompt-data", "addition", task.eval, "--eval-interval", size.eval_interval),
        # Greedy: one sample per prompt is enough, and the curve has no sampling noise.
        *("--eval-temperature", 0.0, "--n-samples-per-eval-prompt", 1),
        *("--actor-num-gpus-per-node", size.num_train_ranks, *precision_and_batching()),
        *("--rollout-num-gpus", size.num_engines, "--rollout-num-gpus-per-engine", 1),
        # Without limits an engine reserves most of the machine's memory for its cache.
        *("--sglang-context-length", 128, "--sglang-max-total-tokens", 32768),
        *("--lr", "2e-4", "--min-lr", "2e-4", "--adam-beta2", 0.95, "--weight-decay", 0.0, "--clip-grad", 1.0),
        *("--check-weight-update-equal", "--save-debug-rollout-data", output / "samples" / "{rollout_id}.pt"),
        *("--save", output / "grpo" / "checkpoints", "--save-interval", size.grpo_rollouts),
        *("--save-hf", output / "hf", "--output-dir", output, "--experiment-name", "grpo"),
    ]


def precision_and_batching() -> list[str]:
    return ["--fp32", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "8192"]


def curve(records: list[dict[str, Any]], name: str, axis: str) -> tuple[list[float], list[float]]:
    points = [(record[axis], record[name]) for record in records if name in record]
    return [x for x, _ in points], [y for _, y in points]


def summarize(records: list[dict[str, Any]], size: Size, seconds_total: float) -> dict[str, Any]:
    _, accuracy = curve(records, "eval/addition", "eval/step")
    _, differences = curve(records, "train/train_rollout_logprob_abs_diff", "train/step")
    # Only the first record has this metric.
    _, first_step = curve(records, "perf/first_step_time", "rollout/step")
    return {
        "accuracy_before": accuracy[0],
        "accuracy_after": accuracy[-1],
        "max_train_rollout_logprob_abs_diff": max(differences),
        "seconds_to_first_step": first_step[0],
        "seconds_total": seconds_total,
        "num_engines": size.num_engines,
        "num_train_ranks": size.num_train_ranks,
        "num_rollouts": size.grpo_rollouts,
    }


def plot_curve(records: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    # Before pyplot is imported: the default backend may need a display.
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    axes.plot(*curve(records, "rollout/raw_reward", "rollout/step"), label="reward of sampled answers", color="#4c72b0")
    axes.plot(*curve(records, "eval/addition", "eval/step"), "o-", label="held-out accuracy (greedy)", color="#c44e52")
    axes.set(xlabel="rollout", ylabel="share of right answers", ylim=(0, 1.02), title="Two-digit addition, GRPO")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def ask(checkpoint: Path, questions: list[str]) -> list[str]:
    """The answers of the exported checkpoint in plain ``transformers``."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32")
    answers = []
    for question in questions:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(**prompt, max_new_tokens=8, do_sample=False)
        answers.append(tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True).strip())
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/demo"))
    parser.add_argument("--warm-start-rollouts", type=int, default=6, help="of 50 steps each")
    parser.add_argument("--grpo-rollouts", type=int, default=80)
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)), help="cores to plan for")
    options = parser.parse_args()
    output = options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    for part in PARTS:  # of an earlier demo, whose metrics would mix with these
        shutil.rmtree(output / part, ignore_errors=True)
    size = size_for(options.cores, options.grpo_rollouts, options.warm_start_rollouts)

    started = time.monotonic()
    task = make_tiny_task(output / "task")
    run_train("supervised warm start", warm_start_command(task, size, output))
    run_train("GRPO", grpo_command(task, size, output))
    records = read_metrics(output, "grpo")
    questions = ["12+34=", "58+67=", "99+99="]
    answers = ask(output / "hf", questions)
    summary = summarize(records, size, time.monotonic() - started)
    (output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    plot_curve(records, output / "reward_curve.png")

    print("\n=== summary ===")
    for name, value in summary.items():
        print(f"{name:>40}  {value:.4g}" if isinstance(value, float) else f"{name:>40}  {value}")
    print("the exported checkpoint answers:", ", ".join(f"{q}{a}" for q, a in zip(questions, answers, strict=True)))
    print(f"summary            {output / 'summary.json'}\nreward curve       {output / 'reward_curve.png'}")
    print(f"TensorBoard        tensorboard --logdir {output}\nsamples            {output / 'samples'}")
    print(f"checkpoint (HF)    {output / 'hf'}")


if __name__ == "__main__":
    main()
