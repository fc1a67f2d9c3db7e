"""A run's folder of any size, made without a run: for the board's benchmark, its picture and its tests.

The numbers look like those of a run that learns. The texts are arithmetic. Written by the same code as a real run.
"""

from __future__ import annotations

import json
import math
import random
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer

from slime.data.sample import Sample
from slime.observability.run_info import write_run_info
from slime.observability.sample_record import record_rollout, record_training
from slime.observability.trace_utils import trace_span

_ARGS = Namespace(reward_key=None, hf_checkpoint=None, rollout_temperature=1.0)
# The key is here so that tests can check that no file of a run shows it.
_COMMAND = ["train.py", "--hf-checkpoint", "model", "--prompt-data", "train.jsonl", "--wandb-key", "secret"]
_COMMAND += ["--apply-chat-template-kwargs", '{"a": "it\'s"}']


def make_run(
    directory: Path,
    *,
    num_rollouts: int,
    num_samples: int,
    response_tokens: int = 200,
    hf_checkpoint: Path | None = None,
    extra_text: str = "",
    seed: int = 0,
) -> Path:
    """Write metrics and recorded samples. Returns ``directory``.

    Args:
        hf_checkpoint: its tokenizer makes the ids. Without it they mean nothing.
        extra_text: begins every response and label, and is in the names of a metric and of the metadata.
        seed: another seed learns faster.
    """
    directory.mkdir(parents=True, exist_ok=True)
    # Fixed seeds: the picture in the docs changes only if the board does.
    chance = random.Random(seed)
    torch.manual_seed(seed)
    encode = _encoder(hf_checkpoint)
    args = Namespace(**vars(_ARGS) | {"hf_checkpoint": None if hf_checkpoint is None else str(hf_checkpoint)})
    write_run_info(directory, vars(args), _COMMAND)
    progress_file = {"state": "finished", "num_rollout": num_rollouts}
    (directory / "progress.json").write_text(json.dumps(progress_file), encoding="utf-8")
    with (directory / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for rollout_id in range(num_rollouts):
            for record in _records(rollout_id, num_rollouts, chance, speed=1 + 0.5 * seed):
                file.write(json.dumps(record | {"time": time.time()}) + "\n")
    for rollout_id in range(num_rollouts):
        progress = rollout_id / max(1, num_rollouts - 1)
        samples = [_sample(i, rollout_id, progress, response_tokens, encode, chance) for i in range(num_samples)]
        for sample in samples if extra_text else []:
            sample.response, sample.label = extra_text + sample.response, extra_text
            sample.metadata[extra_text] = {extra_text: extra_text}
        record_rollout(directory, samples, rollout_id=rollout_id, limit=num_samples, reward_key=_ARGS.reward_key)
        columns = _columns(samples, chance)
        record_training(directory, columns, rollout_id=rollout_id, limit=num_samples, data_parallel_rank=0)
    return directory


def _records(rollout_id: int, num_rollouts: int, chance: random.Random, speed: float) -> list[dict[str, object]]:
    progress = min(1, speed * rollout_id / max(1, num_rollouts - 1))
    noise = chance.gauss
    reward = 0.12 + 0.75 / (1 + math.exp(-8 * (progress - 0.4))) + noise(0, 0.02)
    step: dict[str, object] = {
        "train/loss": 0.02 * noise(0, 1) - 0.01,
        "train/pg_loss": 0.02 * noise(0, 1) - 0.012,
        "train/kl_loss": 0.08 * progress + 0.004 * abs(noise(0, 1)),
        "train/entropy_loss": 1.1 - 0.7 * progress + 0.02 * noise(0, 1),
        "train/grad_norm": 0.6 + 0.5 * math.exp(-4 * progress) + 0.06 * abs(noise(0, 1)),
        "train/pg_clipfrac": 0.01 + 0.02 * abs(noise(0, 0.4)),
        "train/ppo_kl": 0.0005 * abs(noise(0, 1)),
        "train/train_rollout_logprob_abs_diff": 0.006 + 0.001 * abs(noise(0, 1)),
        "train/lr-pg_0": 1e-6,
    }
    length = 180 + 260 * progress + noise(0, 9)
    rollout: dict[str, object] = {
        "rollout/raw_reward": reward,
        "rollout/response_tokens": 256 * length,
        "rollout/response_len/mean": length,
        "rollout/response_len/median": length * 0.9,
        "rollout/response_len/max": min(1024.0, length * 2.6),
        "rollout/truncated_ratio": 0.2 * math.exp(-5 * progress) + 0.01 * abs(noise(0, 1)),
        "rollout/weight_version_lag": 0.0,
        "perf/rollout_time": 21 + 9 * progress + noise(0, 1),
        "perf/ref_log_probs_time": 2.1 + 0.1 * noise(0, 1),
        "perf/log_probs_time": 2.0 + 0.1 * noise(0, 1),
        "perf/actor_train_time": 9.5 + 0.4 * noise(0, 1),
        "perf/update_weights_time": 1.4 + 0.1 * noise(0, 1),
        "perf/step_time": 37 + 9 * progress + noise(0, 1),
        "perf/tokens_per_gpu_per_sec": 2100 + 300 * progress + 40 * noise(0, 1),
        "perf/actor_train_tok_per_s": 11800 + 200 * noise(0, 1),
    }
    rollout |= {f"rollout/other_{i}": noise(0, 1) for i in range(40)}
    records = [
        {"step_key": "train/step", "train/step": rollout_id, **step},
        {"step_key": "rollout/step", "rollout/step": rollout_id, **rollout},
    ]
    if rollout_id % 10 == 0:
        records.append({"step_key": "eval/step", "eval/step": rollout_id, "eval/addition": reward - 0.03})
    return records


def _encoder(hf_checkpoint: Path | None) -> Callable[[str], list[int]]:
    """Text to ids. Without a model any ids will do."""
    if hf_checkpoint is None:
        return lambda text: [ord(character) % 60 for character in text]
    tokenizer = Tokenizer.from_file(str(hf_checkpoint / "tokenizer.json"))
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def _sample(
    position: int,
    rollout_id: int,
    progress: float,
    length: int,
    encode: Callable[[str], list[int]],
    chance: random.Random,
) -> Sample:
    a, b = chance.randrange(10, 99), chance.randrange(10, 99)
    is_right = chance.random() < 0.2 + 0.7 * progress
    answer = a + b if is_right else a + b - 10
    prompt = f"<|im_start|>user\n{a}+{b}=<|im_end|>\n<|im_start|>assistant\n"
    first = f"({a % 10}+{b % 10})={a % 10 + b % 10}\n"
    tool, rest = f"ask: {a}+{b}\n", f"{a}+{b}={answer}<|im_end|>"
    steps = [
        f"{a // 10}0+{b // 10}0={a // 10 * 10 + b // 10 * 10}\n"
        for _ in range(int(length * chance.uniform(0.02, 0.06)))
    ]
    own, observed, last = encode(first + "".join(steps)), encode(tool), encode(rest)
    ids = [*encode(prompt), *own, *observed, *last]
    size = len(own) + len(observed) + len(last)
    tool_places = range(len(own), len(own) + len(observed))
    sample = Sample(
        index=rollout_id * 1000 + position,
        group_index=rollout_id * 100 + position // 8,
        prompt=prompt,
        tokens=ids,
        response=first + "".join(steps) + tool + rest,
        response_length=size,
        reward=float(is_right),
        label=str(a + b),
        # Tokens of the tool have mask 0 and log-prob 0, as rollout functions leave them.
        loss_mask=[int(i not in tool_places) for i in range(size)],
        rollout_log_probs=[0.0 if i in tool_places else -chance.expovariate(1.5) for i in range(size)],
        weight_versions=[str(max(0, rollout_id - 1)), str(rollout_id)],
        status=Sample.Status.TRUNCATED if chance.random() < 0.1 else Sample.Status.COMPLETED,
    )
    attrs = {"max_new_tokens": 1024}
    with trace_span(sample, "generate_and_rm"):
        with trace_span(sample, "sglang_generate", attrs=attrs):
            pass
        with trace_span(sample, "sglang_generate", attrs=attrs):
            pass
    passed = 0.0
    # All events were recorded within microseconds: spread them over seconds.
    for event in sample.trace["events"]:  # type: ignore[attr-defined]
        event["ts"] += passed
        passed += chance.uniform(0.1, 1.5)
    return sample


def _columns(samples: Sequence[Sample], chance: random.Random) -> dict[str, object]:
    engine = [torch.tensor(sample.rollout_log_probs) for sample in samples]
    return {
        "partition": list(range(len(samples))),
        "sample_indices": [sample.index for sample in samples],
        "rewards": [sample.reward - 0.5 for sample in samples],
        "log_probs": [row + 0.01 * torch.randn(len(row)) - 0.06 * (torch.rand(len(row)) > 0.97) for row in engine],
        "advantages": [
            torch.full((len(row),), sample.reward - 0.5) for row, sample in zip(engine, samples, strict=True)
        ],
    }
