"""Train steps with ``--share-prefixes`` against the same samples apart.

    python benchmarks/shared_prefixes.py

    group   8 samples of one prompt of 1,000 tokens, each with a response of 200
    tree    a conversation of 20 turns after a prompt of 200 tokens. A turn has 40 tokens of the policy, which are
            trained on, and 60 of a tool. 7 more samples leave it after turns 16, 17, 17, 18, 18, 19 and 19 and take
            their own last turns
    apart   8 samples of 1,200 tokens without a common beginning

The two trainers have the same weights and take turns. Prints, for each set of samples, tokens that pass the model, the
processor time of a step, and the bytes that a forward pass keeps for the backward pass, each as a ratio to separate
samples. ``--kernels`` compares attention alone, forward and backward, over the group: the packed pieces of the backends
against one call with a mask of all rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.train_step import timed
from slime.backends.training.attention import packed_attention, plan_attention
from slime.batch.packing import rows_of_samples
from slime.doctor.gpu_training import make_batch, start_random, write_model

MODEL = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2, "head_dim": 64, "vocab_size": 1024}
_PROMPT, _TURN, _TURNS = 200, (40, 60), 20
_BRANCHES = (16, 17, 17, 18, 18, 19, 19)


def batches(num_samples: int, scale: float) -> dict[str, dict[str, Any]]:
    """The three sets of samples, one micro-batch each.

    Args:
        scale: factor of all lengths.
    """

    def make(prompt: int, response: int) -> dict[str, Any]:
        lengths = (int(prompt * scale), int(response * scale))
        return make_batch(num_samples, MODEL["vocab_size"], lambda _: lengths, per_micro_batch=num_samples)

    group, apart, tree = make(1000, 200), make(1000, 200), make(_PROMPT, sum(_TURN) * _TURNS)
    _share(group, [int(1000 * scale)] * (num_samples - 1))
    turns = [_BRANCHES[number % len(_BRANCHES)] for number in range(num_samples - 1)]
    _share(tree, [int((_PROMPT + sum(_TURN) * turn) * scale) for turn in turns])
    policy, tool = (int(part * scale) for part in _TURN)
    for mask in tree["loss_masks"]:
        mask.copy_((torch.arange(len(mask)) % (policy + tool) < policy).int())
    tree["rollout_mask_sums"] = torch.stack([mask.sum() for mask in tree["loss_masks"]]).float()
    return {"group": group, "tree": tree, "apart": apart}


def _share(batch: dict[str, Any], lengths: list[int]) -> None:
    first, *others = batch["tokens"]
    for tokens, length in zip(others, lengths, strict=True):
        tokens[:length] = first[:length]


def kept_bytes(trainer: Any, batch: dict[str, Any]) -> int:
    """Memory that a forward pass of the only micro-batch allocates and keeps until the backward pass."""
    from slime.backends.megatron_utils.model.attention import segments_of
    from slime.backends.megatron_utils.step import run_model

    (one,) = trainer._train_batch(dict(batch)).micro_batches(0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        output = run_model(trainer._ready.chunks[0], one, segments_of(one))
    assert output.requires_grad  # alive until here
    return sum(event.self_cpu_memory_usage for event in profile.events())


def steps(rounds: int, num_samples: int, scale: float, only: str | None = None) -> list[dict[str, Any]]:
    """One row of figures for each set of samples, or for the set ``only``."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(folder, {"model_type": "qwen3", **MODEL})
        shared, apart = start_random(model, ["--fp32", "--share-prefixes"]), start_random(model, ["--fp32"])
        for name, batch in batches(num_samples, scale).items():
            if only not in (None, name):
                continue
            times = []
            for number in range(rounds + 1):
                ours = timed(lambda n=number, one=batch: shared.train(n, dict(one)))
                times.append((*ours, *timed(lambda n=number, one=batch: apart.train(n, dict(one)))))
            columns = list(zip(*times[1:], strict=True))  # the first round warms up
            tree, total = shared._train_batch(dict(batch)).prefixes, sum(batch["total_lengths"])
            row = {
                "samples": name,
                "tokens": total,
                "unique_share": round(tree.cost(range(num_samples)) / total, 3),
                "shared_s": round(statistics.median(columns[0]), 3),
                "apart_s": round(statistics.median(columns[2]), 3),
                "time_ratio": round(statistics.median(a / b for a, b in zip(columns[0], columns[2], strict=True)), 3),
                "memory_ratio": round(kept_bytes(shared, batch) / kept_bytes(apart, batch), 3),
                "rounds": rounds,
            }
            print(json.dumps(row), flush=True)
            rows.append(row)
    return rows


def kernels(rounds: int, num_samples: int, scale: float) -> dict[str, Any]:
    """Attention over the group with 4 heads of 64: our pieces ÷ one call with a mask of all rows."""
    prompt, response = int(1000 * scale), int(200 * scale)
    borders = [0, *(prompt + response * (number + 1) for number in range(num_samples))]
    prefixes = [0] + [prompt] * (num_samples - 1)
    plan = plan_attention(borders, shared=prefixes)
    plan.prepare()
    mask = torch.zeros(borders[-1], borders[-1], dtype=torch.bool)
    for spans, begin, end in zip(rows_of_samples(borders, prefixes), borders, borders[1:], strict=False):
        rows = torch.cat([torch.arange(first, first + length) for first, length in spans])
        own = torch.arange(begin, end)
        mask[own[:, None], rows[None]] = rows[None] <= own[:, None]
    query, key, value = (torch.randn(borders[-1], 4, 64, requires_grad=True) for _ in range(3))

    def ours() -> None:
        packed_attention(query, key, value, plan, scale=0.125).sum().backward()

    def masked() -> None:
        parts = (part.transpose(0, 1)[None] for part in (query, key, value))
        F.scaled_dot_product_attention(*parts, attn_mask=mask, scale=0.125).sum().backward()

    times = [(timed(ours)[0], timed(masked)[0]) for _ in range(rounds + 1)][1:]
    row = {
        "kernels": "group",
        "pieces_s": round(statistics.median(one for one, _ in times), 4),
        "mask_s": round(statistics.median(other for _, other in times), 4),
        "ratio": round(statistics.median(one / other for one, other in times), 3),
    }
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--scale", type=float, default=1.0, help="factor of all lengths")
    parser.add_argument("--only", choices=["group", "tree", "apart"], help="this set of samples")
    parser.add_argument("--kernels", action="store_true", help="attention alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = (options.rounds, options.samples, options.scale)
    _ = kernels(*sizes) if options.kernels else steps(*sizes, options.only)


if __name__ == "__main__":
    main()
