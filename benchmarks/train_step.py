"""Our train step against a bare loop on megatron-core, over the same micro-batches.

    python benchmarks/train_step.py

Both take the same model, optimizer and packed micro-batches. The bare loop runs Megatron's schedule with its
cross entropy, reduces the gradients and steps. Our step also has log-probs with the entropy as a metric, the loss of
GRPO, the search for gradients that are not finite, metrics and the report of the rollout. The two take turns. Prints
medians of the processor time of this process, which depends little on other work of the machine. The goal is 1.03.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.doctor.gpu_training import make_batch, num_weights, start_random, write_model
from slime.utils import accelerator

MODEL = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "head_dim": 64, "vocab_size": 4096}


class BareLoop:
    """The loop of a program on megatron-core alone. The micro-batches are packed once, before the clock starts."""

    def __init__(self, trainer: Any, batch: dict[str, Any]) -> None:
        self._state = trainer._ready
        self._inputs = []
        for one in trainer._train_batch(dict(batch)).micro_batches(0):
            lengths = zip(one.indices, one.response_lengths, strict=True)
            targets = torch.cat([batch["tokens"][index][-length:] for index, length in lengths])
            self._inputs.append((one, targets.to(accelerator.current().device())))

    def step(self) -> None:
        # here, because the trainer has rewritten megatron-core for a CPU before
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.pipeline_parallel import get_forward_backward_func

        state = self._state
        for chunk in state.chunks:
            chunk.zero_grad_buffer()
        state.optimizer.zero_grad()
        state.config.finalize_model_grads_func = finalize_model_grads
        get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=iter(self._inputs),
            model=state.chunks[0],
            num_microbatches=len(self._inputs),
            seq_length=1,
            micro_batch_size=1,
            forward_only=False,
        )
        state.optimizer.step()
        state.scheduler.step(increment=1)

    def _forward(self, inputs: Iterator[Any], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

        from slime.backends.megatron_utils.model.attention import segments_of

        one, targets = next(inputs)
        packed = one.packed
        logits = model(packed.tokens, packed.position_ids, None, packed_seq_params=segments_of(one))

        def loss(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
            each = vocab_parallel_cross_entropy(output.transpose(0, 1).float(), targets[:, None])
            return each.sum(), torch.tensor(len(targets), device=each.device), {}

        return logits, loss


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """(processor seconds, wall seconds)."""
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    accelerator.current().synchronize()
    return time.process_time() - cpu, time.perf_counter() - wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--per-micro-batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a sample, an eighth of them in the prompt")
    options = parser.parse_args()
    torch.set_num_threads(1)
    prompt = options.tokens // 8
    lengths = (prompt, options.tokens - prompt)
    batch = make_batch(options.samples, MODEL["vocab_size"], lambda _: lengths, per_micro_batch=options.per_micro_batch)
    with tempfile.TemporaryDirectory() as folder:
        trainer = start_random(write_model(folder, {"model_type": "qwen3", **MODEL}), ["--fp32"])
        bare = BareLoop(trainer, batch)
        rounds = []
        for number in range(options.rounds + 1):
            ours, theirs = timed(lambda n=number: trainer.train(n, dict(batch))), timed(bare.step)
            rounds.append((*ours, *theirs))
    columns = list(zip(*rounds[1:], strict=True))  # the first round warms up
    ours, ours_wall, theirs, theirs_wall = (statistics.median(column) for column in columns)
    result = {
        "weights": num_weights(trainer),
        "tokens": options.samples * options.tokens,
        "rounds": options.rounds,
        "ours_s": round(ours, 4),
        "bare_s": round(theirs, 4),
        "ratio": round(statistics.median(a / b for a, b in zip(columns[0], columns[2], strict=True)), 4),
        "wall_ratio": round(ours_wall / theirs_wall, 4),
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
