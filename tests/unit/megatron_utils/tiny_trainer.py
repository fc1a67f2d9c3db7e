"""Tiny random models, arguments and batches for the trainer's tests. All made by code, nothing is downloaded."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slime.algorithms import arguments as algorithm_arguments
from slime.backends.fsdp_utils.arguments import FsdpArgs
from slime.backends.megatron_utils import arguments as megatron_arguments
from slime.batch.arguments import BatchArgs, ReplayArgs
from slime.config.groups import add_group, groups_in
from slime.observability.arguments import OutputArgs, ProfileArgs
from slime.utils.accelerator import allow_torchvision_on_cpu
from slime.utils.net import single_rank_environment

VOCAB = 61
"""Not a multiple of 128: the padding of the vocabulary takes part in every test."""

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def make_hf_model(kind: str, path: Path, **overrides: Any) -> Any:
    """A random fp32 ``transformers`` model of ``kind`` (qwen3, qwen2, llama, llama3), saved at ``path``."""
    allow_torchvision_on_cpu()
    import transformers

    settings = _COMMON | overrides
    match kind:
        case "qwen3":
            config = transformers.Qwen3Config(**settings)
        case "qwen2":
            config = transformers.Qwen2Config(**{k: v for k, v in settings.items() if k != "head_dim"})
        case "llama":
            config = transformers.LlamaConfig(**settings)
        case "llama3":
            config = transformers.LlamaConfig(**settings, rope_parameters=_LLAMA3)
        case _:
            raise ValueError(kind)
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if "norm" in name:
                parameter.copy_(1 + 0.1 * noise)
            else:
                parameter.copy_(0.15 * noise)  # logits far from uniform, biases not zero
    model.save_pretrained(path)
    return model.eval()


def make_args(hf_checkpoint: Path | str, **overrides: Any) -> argparse.Namespace:
    """Arguments of a trainer in fp32 with constant learning rate, everything else default."""
    parser = argparse.ArgumentParser()
    for group in groups_in(megatron_arguments, algorithm_arguments):
        add_group(parser, group)
    add_group(parser, FsdpArgs)
    add_group(parser, BatchArgs)
    add_group(parser, ReplayArgs)
    add_group(parser, OutputArgs)
    add_group(parser, ProfileArgs)
    args = parser.parse_args([])
    settings = {
        "hf_checkpoint": str(hf_checkpoint),
        "train_backend": "megatron",
        "fp32": True,
        "lr": 1e-2,
        "lr_decay_style": "constant",
        "num_rollout": 10,
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 2,
        "global_batch_size": 8,
        "rollout_temperature": 1.0,
        "output_dir": "outputs",
        "record_samples": 0,
        "distributed_timeout_minutes": 10.0,
    }
    for name, value in (settings | overrides).items():
        setattr(args, name, value)
    return args


def make_batch(
    num_samples: int = 8, *, seed: int = 0, with_rollout: bool = True, lengths: Sequence[tuple[int, int]] = ()
) -> dict[str, Any]:
    """Columns of a whole rollout as one rank would get it: uneven lengths, partly masked, one step, mixed packing.

    ``lengths`` are (prompt, response) of the last samples, instead of random ones.
    """
    generator = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    prompts = [number(1, 12) for _ in range(num_samples)]
    responses = [number(1, 30) for _ in range(num_samples)]
    for index, (prompt, response) in enumerate(lengths, start=num_samples - len(lengths)):
        prompts[index], responses[index] = prompt, response
    masks = [(torch.rand(n, generator=generator) < 0.8).int() for n in responses]
    masks[0].fill_(0)  # a sample that is not trained at all
    batch: dict[str, Any] = {
        "tokens": [
            torch.randint(0, VOCAB, (p + r,), generator=generator) for p, r in zip(prompts, responses, strict=True)
        ],
        "response_lengths": responses,
        "total_lengths": [p + r for p, r in zip(prompts, responses, strict=True)],
        "loss_masks": masks,
        "rewards": torch.randn(num_samples, generator=generator).tolist(),
        "raw_reward": [float(i % 2) for i in range(num_samples)],
        "truncated": [0] * num_samples,
        "rollout_mask_sums": torch.tensor([float(mask.sum()) for mask in masks]),
        "sample_indices": list(range(num_samples)),
        "rollout_ids": list(range(num_samples)),
        "partition": list(range(num_samples)),
        "global_batch_sizes": [num_samples],
    }
    if with_rollout:
        batch["rollout_log_probs"] = [-3 * torch.rand(n, generator=generator) for n in responses]
    return schedule(batch, [list(range(num_samples))])


def with_shared_prefixes(batch: dict[str, Any], *, seed: int = 0) -> dict[str, Any]:
    """The batch with most samples beginning like an earlier one, of which some are whole beginnings of others.

    The engine's experts, if there are any, are those of the earlier sample for all tokens but some.
    """
    generator = torch.Generator().manual_seed(seed)
    changed = {
        name: [one.clone() for one in batch[name]] for name in ("tokens", "rollout_routed_experts") if name in batch
    }
    for index in range(1, len(batch["tokens"])):
        other = int(torch.randint(0, index, (1,), generator=generator))
        most = min(len(batch["tokens"][index]), len(batch["tokens"][other]))
        share = float(torch.rand(1, generator=generator))
        length = most if share < 0.3 else int(most * share)
        changed["tokens"][index][:length] = changed["tokens"][other][:length]
        if len(changed) > 1:
            length = min(length - index % 3, most - 1)
            changed["rollout_routed_experts"][index][:length] = changed["rollout_routed_experts"][other][:length]
    return batch | changed


def with_sampling_sets(batch: dict[str, Any], *, seed: int = 0) -> dict[str, Any]:
    """The batch as if top-p had cut the vocabulary: some ids for every response token, itself among them."""
    generator = torch.Generator().manual_seed(seed)
    ids, offsets = [], []
    for tokens, length in zip(batch["tokens"], batch["response_lengths"], strict=True):
        dense = torch.rand(length, VOCAB, generator=generator) < 0.1
        dense[torch.arange(length), tokens[len(tokens) - length :]] = True
        ids.append(dense.nonzero()[:, 1].int())
        offsets.append(torch.cat([torch.zeros(1), dense.sum(1).cumsum(0)]).int())
    return batch | {"rollout_top_p_token_ids": ids, "rollout_top_p_token_offsets": offsets}


def schedule(batch: dict[str, Any], steps: list[list[int]], size: int = 3) -> dict[str, Any]:
    """Cut the samples of every step into micro-batches of ``size``."""
    micro_batches = [[step[i : i + size] for i in range(0, len(step), size)] for step in steps]
    return batch | {
        "micro_batch_indices": [one for step in micro_batches for one in step],
        "num_microbatches": [len(step) for step in micro_batches],
    }


def split_batch(
    batch: dict[str, Any], rank: int, world_size: int, num_steps: int = 1, *, size: int = 3
) -> dict[str, Any]:
    """Rank ``rank``'s part: each step's samples dealt out in turn, the same number of micro-batches on every rank."""
    num_samples = len(batch["tokens"])
    per_step = num_samples // num_steps
    mine = [list(range(s * per_step, (s + 1) * per_step))[rank::world_size] for s in range(num_steps)]
    order = [index for step in mine for index in step]
    part: dict[str, Any] = {}
    for name, column in batch.items():
        if name == "rollout_mask_sums":
            part[name] = column[torch.tensor(order)]
        elif isinstance(column, list) and len(column) == num_samples and name != "raw_reward":
            part[name] = [column[index] for index in order]
        else:
            part[name] = column
    part["global_batch_sizes"] = [per_step] * num_steps
    local, begin = [], 0
    for step in mine:
        local.append(list(range(begin, begin + len(step))))
        begin += len(step)
    return schedule(part, local, size)


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    """Copies of the trained weights under their Hugging Face names: all of them, or the adapters."""
    weights = trainer.export_weights() if trainer._lora is None else trainer.export_adapter()
    return {name: value.clone() for name, value in weights}


def use_single_rank_env() -> None:
    torch.set_num_threads(1)  # several tests share few cores
    os.environ.update(single_rank_environment())


@contextmanager
def single_rank() -> Iterator[None]:
    """This process as the only rank of trainers. Cleans up afterwards."""
    use_single_rank_env()
    yield
    if dist.is_initialized():
        from slime.backends.megatron_utils.process_groups import destroy_distributed

        destroy_distributed()
