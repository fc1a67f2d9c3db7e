"""One GRPO step of our trainer and of TRL, over the same samples and the same weights.

    python benchmarks/trl_step.py

The tiny model of the demo, 256 samples of 64 response tokens after 16 prompt tokens, groups of 8, one optimizer step,
float32, one thread. No side generates: TRL gets the tokens by its ``rollout_func``, ours as a batch. A step is the
whole training on a rollout: advantages, forward and backward passes, clipping, the optimizer, metrics. Both sides take
micro-batches of the same number of samples. TRL is installed by pip in an environment below ``--env``, which sees the
packages of this one, so that both have the same torch. The two processes take turns, step by step. Prints the medians
and the median of the rounds' ratios. The goal is 1.0.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

ROOT = Path(__file__).resolve().parents[1]
TRL = "trl==1.16.0"


def tokens_of(job: dict[str, Any]) -> tuple[list[list[int]], list[list[int]], list[float]]:
    """Prompts, responses and rewards: one prompt per group."""
    import torch

    generator = torch.Generator().manual_seed(0)

    def draw(length: int) -> list[int]:
        ids: list[int] = torch.randint(4, job["vocabulary"], (length,), generator=generator).tolist()
        return ids

    prompts = [draw(job["prompt"]) for _ in range(job["samples"] // job["group"])]
    repeated = [prompt for prompt in prompts for _ in range(job["group"])]
    responses = [draw(job["response"]) for _ in repeated]
    return repeated, responses, torch.rand(len(repeated), generator=generator).tolist()


# ------------------------------------------------------------------------------------------------ the two sides


def our_step(job: dict[str, Any]) -> Callable[[], object]:
    """A function that makes one step."""
    from slime.batch.compile import compile_train_data
    from slime.batch.rewards import RewardArgs
    from slime.batch.schedule import MicroBatchArgs, ParallelLayout
    from slime.batch.ship import split_by_dp
    from slime.data.sample import Sample
    from slime.doctor.gpu_training import start_trainer

    trainer = start_trainer(job["model"], ["--fp32", "--lr", "1e-6"])
    prompts, responses, rewards = tokens_of(job)
    count = 0

    def step() -> None:
        nonlocal count
        groups = []
        for index, (prompt, response, reward) in enumerate(zip(prompts, responses, rewards, strict=True)):
            sample = Sample(group_index=index // job["group"], index=index, reward=reward)
            sample.tokens, sample.response_length = prompt + response, len(response)
            sample.status = Sample.Status.COMPLETED
            groups.append([sample])
        data = compile_train_data(groups, rewards=RewardArgs(n_samples_per_prompt=job["group"]))
        settings = MicroBatchArgs(micro_batch_size=job["per_micro_batch"])
        layout = ParallelLayout(dp_size=1)
        parts = split_by_dp(data, layout=layout, global_batch_size=job["samples"], settings=settings).ranks
        trainer.train(count, parts[0])
        count += 1

    return step


def trl_step(job: dict[str, Any]) -> Callable[[], object]:
    """The same for TRL. Its trainer runs in a thread, one optimizer step per call."""
    import queue
    import threading

    from slime.utils.accelerator import allow_torchvision_on_cpu

    allow_torchvision_on_cpu()  # torchvision of this wheel index does not import beside a CPU torch
    import datasets
    import transformers
    import trl

    prompts, responses, rewards = tokens_of(job)

    def rollout(texts: list[str], trainer: Any) -> dict[str, Any]:
        numbers = [int(text) for text in texts]  # a prompt's text is the number of its group
        seen: dict[int, int] = {}
        rows = []
        for number in numbers:
            rows.append(number * job["group"] + seen.get(number, 0))
            seen[number] = seen.get(number, 0) + 1
        return {
            "prompt_ids": [prompts[row] for row in rows],
            "completion_ids": [responses[row] for row in rows],
            "logprobs": None,
            "reward": [rewards[row] for row in rows],
        }

    begins: queue.Queue[None] = queue.Queue()
    ends: queue.Queue[None] = queue.Queue()

    class Turns(transformers.TrainerCallback):  # type: ignore[misc]  # transformers has no types
        def on_step_begin(self, *given: Any, **named: Any) -> None:
            begins.get()

        def on_step_end(self, *given: Any, **named: Any) -> None:
            ends.put(None)

    config = trl.GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=job["per_micro_batch"],
        gradient_accumulation_steps=job["samples"] // job["per_micro_batch"],
        num_generations=job["group"],
        max_completion_length=job["response"],
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        weight_decay=0.01,
        max_grad_norm=1.0,
        beta=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        max_steps=job["rounds"] + 1,
        shuffle_dataset=False,
    )
    trainer = trl.GRPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype="float32"),
        processing_class=transformers.AutoTokenizer.from_pretrained(job["model"]),
        reward_funcs=lambda completions, reward, **_: reward,
        args=config,
        train_dataset=datasets.Dataset.from_dict(
            {"prompt": [str(number) for number in range(job["samples"] // job["group"])]}
        ),
        rollout_func=rollout,
        callbacks=[Turns()],
    )
    threading.Thread(target=trainer.train, daemon=True).start()

    def step() -> None:
        begins.put(None)
        ends.get()

    return step


def serve(side: str, job: dict[str, Any]) -> None:
    """Make a step for every line of the input. Answers with (processor seconds, wall seconds)."""
    import torch

    torch.set_num_threads(1)
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not be taken for an answer
    step = {"ours": our_step, "trl": trl_step}[side](job)
    for _ in sys.stdin:
        cpu, wall = time.process_time(), time.perf_counter()
        step()
        print(json.dumps([time.process_time() - cpu, time.perf_counter() - wall]), file=output, flush=True)
    os._exit(0)  # TRL's thread waits for a turn


# -------------------------------------------------------------------------------------------------- measuring


def trl_python(directory: Path) -> str:
    """The interpreter of the environment with TRL. It is made once."""
    python = directory / "bin" / "python"
    if not (directory / "complete").exists():
        venv.create(directory, with_pip=True, clear=True)
        [site] = directory.glob("lib/python*/site-packages")
        (site / "of_the_project.pth").write_text(sysconfig.get_paths()["purelib"])
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", TRL], check=True)
        (directory / "complete").touch()
    return str(python)


class Side:
    """A process that makes steps when asked."""

    def __init__(self, python: str, name: str, job: dict[str, Any]) -> None:
        command = [python, str(Path(__file__).resolve()), "--side", name, "--job", json.dumps(job)]
        env = os.environ | {"OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def step(self) -> list[float]:
        """(processor seconds, wall seconds) of one step."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print("step", file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the process ended with exit status {self._process.wait()}: its error is above")
        seconds: list[float] = json.loads(line)
        return seconds

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


def compare(job: dict[str, Any], pythons: dict[str, str]) -> list[dict[str, list[float]]]:
    """Rounds in which each side makes one step. The first round, which warms up, is left out."""
    sides = {name: Side(python, name, job) for name, python in pythons.items()}
    try:
        rounds = [{name: side.step() for name, side in sides.items()} for _ in range(job["rounds"] + 1)]
    finally:
        for side in sides.values():
            side.stop()
    return rounds[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--response", type=int, default=64)
    parser.add_argument("--per-micro-batch", type=int, default=64)
    parser.add_argument("--env", type=Path, default=ROOT / "outputs" / "trl_env")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        serve(options.side, json.loads(options.job))
        return
    from tools.make_tiny_task import make_tiny_task

    pythons = {"ours": sys.executable, "trl": trl_python(options.env)}
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_task(folder).model
        vocabulary = json.loads(Path(model, "config.json").read_text())["vocab_size"]
        job = {name: value for name, value in vars(options).items() if isinstance(value, int)}
        rounds = compare(job | {"model": model, "vocabulary": vocabulary}, pythons)
    medians = {name: [round(statistics.median(one[name][i] for one in rounds), 4) for i in (0, 1)] for name in pythons}
    ratios = [statistics.median(one["ours"][i] / one["trl"][i] for one in rounds) for i in (0, 1)]
    result = {
        **job,
        "ours_cpu_s, wall_s": medians["ours"],
        "trl_cpu_s, wall_s": medians["trl"],
        "ratio": round(ratios[0], 3),
        "wall_ratio": round(ratios[1], 3),
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
