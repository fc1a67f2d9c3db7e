"""Known-good curves: every algorithm learns the demo's task with the real stack, and the pages show what came of it.

    python benchmarks/algorithm_curves.py grpo ppo      run these, record them, draw them, write them into their pages
    python benchmarks/algorithm_curves.py               the same for all of them
    python benchmarks/algorithm_curves.py --draw        pictures and pages from the record, without a run

Two-digit addition, from the demo's warm start (a teacher who forgets to carry), on one engine and one trainer rank. An
algorithm differs from the demo's GRPO by the flags in ``ALGORITHMS`` and by nothing else. ``sft`` starts from a random
model. ``opd`` has the model of the ``grpo`` run as its teacher and no reward.

    docs/algorithms/curves.jsonl         the record: one line per algorithm
    docs/images/curves/<algorithm>.png   one picture each
    docs/algorithms/<page>.md            the marked part
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.marked_part import with_part
from examples.demo.run_demo import Size, curve, grpo_command, warm_start_command
from examples.tiny.recipe import read_metrics, run_train
from tools.make_tiny_task import TinyTask, make_tiny_task

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "docs" / "algorithms" / "curves.jsonl"
PICTURES = ROOT / "docs" / "images" / "curves"
BEGIN, END = "<!-- curve of {name}: begin -->", "<!-- curve of {name}: end -->"
EVALUATIONS = 8
WITHOUT_REWARD = ("opd", "sft")
SFT_STEPS_PER_ROLLOUT, SFT_BATCH = 10, 128
Point = tuple[float, float]


@dataclass(frozen=True)
class Algorithm:
    """One curve.

    Attributes:
        page: of docs/algorithms that shows it.
        flags: added to the demo's GRPO command. The last of two equal flags counts.
        signal: metric of the lower panel beside the trainer/engine difference. None without one.
    """

    title: str
    page: str
    flags: tuple[str, ...] = ()
    signal: str | None = None


def _estimator(name: str, *more: str) -> tuple[str, ...]:
    return ("--advantage-estimator", name, *more)


ALGORITHMS = {
    "grpo": Algorithm("GRPO", "grpo"),
    "gspo": Algorithm("GSPO", "gspo", _estimator("gspo", "--eps-clip", "3e-4", "--eps-clip-high", "4e-4")),
    "cispo": Algorithm(
        "CISPO",
        "cispo",
        _estimator("cispo", "--eps-clip", "1.0", "--eps-clip-high", "4.0", "--calculate-per-token-loss"),
    ),
    "reinforce_plus_plus": Algorithm(
        "REINFORCE++",
        "reinforce_plus_plus",
        _estimator("reinforce_plus_plus", "--normalize-advantages"),
    ),
    "reinforce_plus_plus_baseline": Algorithm(
        "REINFORCE++ with a baseline",
        "reinforce_plus_plus",
        _estimator("reinforce_plus_plus_baseline", "--normalize-advantages"),
    ),
    "ppo": Algorithm(
        "PPO",
        "ppo",
        _estimator("ppo", "--normalize-advantages", "--num-critic-only-steps", "4"),
        "train/critic-value_loss",
    ),
    "opd": Algorithm(
        "On-policy distillation", "distillation", ("--use-opd", "--opd-type", "megatron"), "train/opd_reverse_kl"
    ),
    "sft": Algorithm("Supervised fine-tuning", "sft", (), "train/loss"),
}


def warm_start(output: Path, size: Size) -> TinyTask:
    """Task and warm-started model below ``output``, made once."""
    task = make_tiny_task(output / "task")
    # All algorithms share it: curves that start from different models cannot be compared.
    if not (output / "warm_start" / "hf").exists():
        run_train("supervised warm start", warm_start_command(task, size, output))
    return task


def command(name: str, task: TinyTask, size: Size, output: Path) -> list[Any]:
    """Flags of ``train.py`` for one algorithm."""
    folder = output / name
    common = [*("--output-dir", output, "--experiment-name", name, "--num-rollout", size.grpo_rollouts)]
    common += [*("--save", folder / "checkpoints", "--save-interval", size.grpo_rollouts, "--save-hf", folder / "hf")]
    if name == "sft":
        return _sft_command(task, size, output) + common
    flags = grpo_command(task, size, output) + common + list(ALGORITHMS[name].flags)
    flags += ["--save-debug-rollout-data", folder / "samples" / "{rollout_id}.pt"]
    if name == "opd":
        # The trainer holds the teacher, so it needs the Megatron checkpoint, not the exported one.
        teacher = output / "grpo" / "checkpoints"
        if not teacher.exists():
            raise SystemExit(f"opd learns from the model of the grpo run, and {teacher} is missing: run grpo first.")
        no_reward = "examples.on_policy_distillation.reward.no_reward"
        flags += ["--opd-teacher-load", teacher, "--custom-rm-path", no_reward, *_graded_evaluation(task, output)]
    return flags


def _graded_evaluation(task: TinyTask, output: Path) -> list[Any]:
    """An evaluation with another reward and chat template, for runs whose training has none."""
    graded = f"{ROOT / 'examples' / 'demo' / 'reward.py'}:reward_func"
    addition = {"name": "addition", "path": task.eval, "custom_rm_path": graded, "apply_chat_template": True}
    config = output / "eval.json"
    config.write_text(json.dumps({"eval": {"datasets": [addition]}}), encoding="utf-8")
    return ["--eval-config", config]


def _sft_command(task: TinyTask, size: Size, output: Path) -> list[Any]:
    """The demo's warm start in smaller rollouts, with an engine that is evaluated in between."""
    flags = warm_start_command(task, size, output)
    # This flag starts no engines, but the curve needs one for its evaluations.
    flags.remove("--debug-train-only")
    return [
        *flags,
        *("--rollout-batch-size", SFT_BATCH * SFT_STEPS_PER_ROLLOUT, "--num-steps-per-rollout", SFT_STEPS_PER_ROLLOUT),
        *("--rollout-max-response-len", 8, *_graded_evaluation(task, output), "--label-key", "label"),
        *("--eval-interval", size.eval_interval, "--eval-temperature", 0.0, "--n-samples-per-eval-prompt", 1),
        *("--rollout-num-gpus", 1, "--sglang-context-length", 128, "--sglang-max-total-tokens", 32768),
    ]


def run(name: str, rollouts: int, output: Path) -> dict[str, Any]:
    """Run one algorithm. Returns its line of the record."""
    size = Size(1, 1, warm_start_rollouts=6, grpo_rollouts=rollouts, eval_interval=max(1, rollouts // EVALUATIONS))
    task = warm_start(output, size)
    # Files of an earlier run must not mix with the new ones: both would be one curve.
    shutil.rmtree(output / name, ignore_errors=True)
    started = time.monotonic()
    run_train(ALGORITHMS[name].title, command(name, task, size, output))
    seconds = time.monotonic() - started
    records = read_metrics(output, name)
    return {
        "name": name,
        "rollouts": rollouts,
        "seconds": round(seconds),
        "accuracy": points(records, "eval/addition", "eval/step"),
        "reward": [] if name in WITHOUT_REWARD else points(records, "rollout/raw_reward", "rollout/step"),
        "difference": points(records, "train/train_rollout_logprob_abs_diff", "train/step"),
        "signal": points(records, ALGORITHMS[name].signal, "train/step"),
    }


def points(records: list[dict[str, Any]], metric: str | None, axis: str) -> list[Point]:
    """(step, value) in four significant digits. Empty if the metric is not logged."""
    if metric is None:
        return []
    return [(x, float(f"{y:.4g}")) for x, y in zip(*curve(records, metric, axis), strict=True)]


def load_record(path: Path = RECORD) -> dict[str, dict[str, Any]]:
    """Lines of the record by algorithm, in the order of ``ALGORITHMS``."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = {record["name"]: record for record in map(json.loads, lines)}
    return {name: found[name] for name in ALGORITHMS if name in found}


def add_to_record(line: dict[str, Any], path: Path = RECORD) -> None:
    # A new run replaces the old line of its algorithm.
    kept = load_record(path) | {line["name"]: line}
    text = "".join(json.dumps(kept[name], separators=(",", ":")) + "\n" for name in ALGORITHMS if name in kept)
    path.write_text(text, encoding="utf-8")


def draw(record: dict[str, Any], grpo: dict[str, Any] | None, path: Path) -> None:
    """The picture of one algorithm. GRPO's held-out accuracy, or that of the teacher, is gray."""
    import matplotlib
    from PIL import Image

    # Before pyplot is imported: the default backend may need a display.
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    algorithm = ALGORITHMS[record["name"]]
    figure, (upper, lower) = plt.subplots(
        2, 1, figsize=(7, 4.6), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    if grpo is not None and record["name"] == "opd":
        upper.axhline(grpo["accuracy"][-1][1], linestyle="--", color="#999999", label="the teacher's accuracy")
    elif grpo is not None and record["name"] not in ("grpo", "sft"):
        upper.plot(*zip(*grpo["accuracy"], strict=True), "--", color="#999999", label="GRPO's held-out accuracy")
    if record["reward"]:
        upper.plot(*zip(*record["reward"], strict=True), color="#4c72b0", label="reward of sampled answers")
    upper.plot(*zip(*record["accuracy"], strict=True), "o-", color="#c44e52", label="held-out accuracy (greedy)")
    upper.set(ylabel="share of right answers", ylim=(0, 1.02), title=f"Two-digit addition, {algorithm.title}")
    upper.legend(loc="lower right")
    steps, values = zip(*(record["signal"] or record["difference"]), strict=True)
    per_rollout = (steps[-1] + 1) / record["rollouts"]  # optimizer steps
    lower.plot([step / per_rollout for step in steps], values, color="#55a868")
    lower.set(xlabel="rollout", ylabel=LOWER[algorithm.signal], ylim=(0, None))
    lower.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=100)
    plt.close(figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.open(drawn).convert("RGB").quantize(64).save(path, optimize=True)  # a third of the size


def page_part(record: dict[str, Any]) -> str:
    """The part between the marks of a page: picture, figures, command."""
    name, algorithm = record["name"], ALGORITHMS[record["name"]]
    accuracy = [value for _, value in record["accuracy"]]
    figures = [("held-out accuracy (greedy)", f"{accuracy[0]:.3f} → {accuracy[-1]:.3f}")]
    if record["reward"]:
        rewards = [value for _, value in record["reward"]]
        figures.append(("reward of sampled answers", f"{rewards[0]:.3f} → {rewards[-1]:.3f}"))
    if record["signal"]:
        signals = [value for _, value in record["signal"]]
        figures.append((f"`{algorithm.signal}`", f"{signals[0]:.3g} → {signals[-1]:.3g}"))
    if record["difference"]:
        largest = max(value for _, value in record["difference"])
        figures.append(("largest `train/train_rollout_logprob_abs_diff` of a step", f"{largest:.1e}"))
    figures.append((f"{record['rollouts']} rollouts, start and evaluations included", f"{record['seconds']} s"))
    origin = ORIGIN.get(name) or f"The demo's GRPO with `{' '.join(algorithm.flags)}`."
    lines = [
        f"![{algorithm.title}: accuracy over rollouts](../images/curves/{name}.png)",
        f"{origin} One engine, one trainer rank, 4 shared cores:",
        "| what | figure |\n|---|---|\n" + "\n".join(f"| {what} | {figure} |" for what, figure in figures),
        f"```bash\npython benchmarks/algorithm_curves.py {'grpo ' if name == 'opd' else ''}{name}\n```",
    ]
    return "\n\n".join(lines)


LOWER = {
    None: "|log-prob diff.|\ntrainer, engine",
    "train/critic-value_loss": "value loss",
    "train/opd_reverse_kl": "reverse KL\nto the teacher",
    "train/loss": "loss",
}
ORIGIN = {
    "grpo": "The demo's GRPO.",
    "opd": "No reward. The student is the demo's warm start. The teacher is the last model of the GRPO run,\n"
    "held by the trainer (`--opd-type megatron`).",
    "sft": "The demo's warm start from a random model, on solutions of a teacher who mostly forgets to carry: the\n"
    "accuracy that the model can learn is about the share of problems without a carry.",
}


def pages(records: dict[str, dict[str, Any]]) -> dict[Path, str]:
    """Every page with a marked part, as it should be."""
    texts: dict[Path, str] = {}
    for name, record in records.items():
        path = RECORD.parent / f"{ALGORITHMS[name].page}.md"
        text = texts.get(path) or path.read_text(encoding="utf-8")
        marks = BEGIN.format(name=name), END.format(name=name)
        texts[path] = with_part(path.name, text, marks, page_part(record))
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("algorithms", nargs="*", metavar="NAME", help=f"all when left out: {', '.join(ALGORITHMS)}")
    parser.add_argument("--rollouts", type=int, default=40)
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/curves"), help="runs, and the warm start they share"
    )
    parser.add_argument("--draw", action="store_true", help="pictures and pages only, from the record")
    options = parser.parse_args()
    if unknown := set(options.algorithms) - ALGORITHMS.keys():
        parser.error(f"no algorithm {', '.join(sorted(unknown))}; there are {', '.join(ALGORITHMS)}")
    output = options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    # Recorded one by one, so that an interrupted command keeps the finished runs.
    for name in [] if options.draw else options.algorithms or ALGORITHMS:
        add_to_record(run(name, options.rollouts, output))
    records = load_record()
    for name, record in records.items():
        draw(record, records.get("grpo"), PICTURES / f"{name}.png")
    for path, text in pages(records).items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
