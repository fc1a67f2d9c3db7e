"""The checks of ``slime doctor --gpu`` that train: real trainers with random weights, on one device, without engines.

megatron-core is imported for one kind of device, which ``SLIME_ACCELERATOR`` names. So the comparison of CPU and CUDA
runs ``python -m slime.doctor.gpu_training JOB`` once for each. Sections are listed in ``gpu_check``.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from slime.algorithms import arguments as algorithm_arguments
from slime.backends.fsdp_utils.arguments import FsdpArgs
from slime.backends.megatron_utils import arguments as megatron_arguments
from slime.backends.megatron_utils.optimizer_rules import low_precision_here
from slime.batch.arguments import BatchArgs, ReplayArgs
from slime.batch.compile import compile_train_data
from slime.batch.rewards import RewardArgs
from slime.batch.schedule import MicroBatchArgs, ParallelLayout
from slime.batch.ship import split_by_dp
from slime.config.groups import add_group, groups_in, with_values
from slime.data.sample import Sample
from slime.doctor.gpu_kernels import Result, judged, judged_on_cuda, relative
from slime.observability.arguments import OutputArgs, ProfileArgs
from slime.utils import accelerator
from slime.utils.net import single_rank_environment

_STEPS = 3

# ---------------------------------------------------------------------------------------------------- models

_TINY: dict[str, Any] = {
    "architectures": ["Tiny"],
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
TINY_MODELS: dict[str, dict[str, Any]] = {
    "dense": {"model_type": "qwen3"},
    "moe": {"model_type": "qwen3_moe", "num_experts": 8, "decoder_sparse_step": 1, "mlp_only_layers": [], **_EXPERTS},
    "mla": {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        **_EXPERTS,
    },
    "hybrid": {
        "model_type": "qwen3_next",
        # the norm after the delta rule amplifies rounding of small outputs
        "rms_norm_eps": 1e-2,
        "partial_rotary_factor": 0.25,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "num_experts": 8,
        "shared_expert_intermediate_size": 32,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        **_EXPERTS,
    },
}
_LARGE: dict[str, Any] = {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "head_dim": 128}
LARGE_MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-1.7B": {
        "model_type": "qwen3",
        **_LARGE,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "4 layers of Qwen3-30B-A3B": {
        "model_type": "qwen3_moe",
        **_LARGE,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}


def write_model(directory: str, settings: dict[str, Any]) -> str:
    """A Hugging Face directory with a ``config.json`` alone. Returns its path."""
    Path(directory).mkdir(parents=True, exist_ok=True)
    Path(directory, "config.json").write_text(json.dumps(_TINY | settings))
    return directory


def trainer_args(directory: str, words: Sequence[str] = ()) -> argparse.Namespace:
    """The arguments of a trainer of the model in ``directory``: the flags ``words``, the defaults of all others."""
    parser = argparse.ArgumentParser()
    groups = (
        *groups_in(megatron_arguments, algorithm_arguments),
        FsdpArgs,
        BatchArgs,
        ReplayArgs,
        OutputArgs,
        ProfileArgs,
    )
    for group in groups:
        add_group(parser, group)
    args = parser.parse_args(["--lr", "1e-3", "--lr-decay-style", "constant", *words])
    # of the rooms that only a whole run needs
    others = {"hf_checkpoint": directory, "train_backend": "megatron", "rollout_temperature": 1.0, "num_rollout": 100}
    others |= {"rollout_batch_size": 4, "n_samples_per_prompt": 2, "global_batch_size": 8}
    others |= {"output_dir": directory, "record_samples": 0}
    return with_values(args, **others)


def start_trainer(directory: str, words: Sequence[str] = (), *, with_ref: bool = False) -> Any:
    """A trainer with the weights of ``directory``: the only rank of its process, ready to train."""
    # imports megatron-core, and on a CPU rewrites it
    from slime.backends.megatron_utils.actor import MegatronTrainer

    return _started(MegatronTrainer, directory, words, with_ref=with_ref)


def start_random(directory: str, words: Sequence[str] = (), *, scale: float = 0.02, noise: float = 0.0) -> Any:
    """A trainer with random weights.

    Args:
        scale: standard deviation of weights.
        noise: standard deviation of the change of norms.
    """
    from slime.backends.megatron_utils.actor import MegatronTrainer

    class RandomTrainer(MegatronTrainer):
        @torch.no_grad()
        def _load_weights(self) -> int:
            generator = torch.Generator(device=accelerator.current().device()).manual_seed(5)
            for chunk in self._ready.chunks:
                for name, parameter in chunk.named_parameters():
                    if "norm" in name:  # ones, or zeros of a norm that adds one
                        parameter.add_(torch.empty_like(parameter).normal_(0.0, noise, generator=generator))
                    else:
                        parameter.normal_(0.0, scale, generator=generator)
            self._begin_with_filled()
            return 0

    return _started(RandomTrainer, directory, words, with_ref=False)


def _started(kind: Callable[..., Any], directory: str, words: Sequence[str], *, with_ref: bool) -> Any:
    if not torch.distributed.is_initialized():  # the port of an inherited variable is that of another group
        os.environ.update(single_rank_environment())
    trainer = kind(trainer_args(directory, words), rank=0, world_size=1, with_ref=with_ref)
    trainer.setup()
    return trainer


def num_weights(trainer: Any) -> int:
    return sum(tensor.numel() for _, tensor in trainer.export_weights())


def make_batch(
    num_samples: int, vocabulary: int, lengths: Callable[[int], tuple[int, int]], *, per_micro_batch: int, seed: int = 0
) -> dict[str, Any]:
    """A rollout as the rank of a trainer receives it, with one optimizer step.

    Args:
        lengths: number of the sample -> tokens of (prompt, response).
    """
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for index in range(num_samples):
        prompt, response = lengths(index)
        sample = Sample(group_index=index // 2, index=index, reward=float(torch.rand((), generator=generator)))
        sample.tokens = torch.randint(0, vocabulary, (prompt + response,), generator=generator).tolist()
        sample.response_length = response
        sample.rollout_log_probs = [-1.0] * response
        sample.status = Sample.Status.COMPLETED
        samples.append([sample])
    data = compile_train_data(samples, rewards=RewardArgs(n_samples_per_prompt=2))
    settings = MicroBatchArgs(micro_batch_size=per_micro_batch)
    layout = ParallelLayout(dp_size=1)
    return split_by_dp(data, layout=layout, global_batch_size=num_samples, settings=settings).ranks[0]


def _tiny_batch(seed: int) -> dict[str, Any]:
    return make_batch(8, 61, lambda index: (3 + index, 5 + (7 * index + seed) % 23), per_micro_batch=3, seed=seed)


# ------------------------------------------------------------------------------------ three steps of tiny models


@dataclass(frozen=True)
class Job:
    """Three GRPO steps of tiny models in a new process.

    Attributes:
        models: names of TINY_MODELS.
        folder: has a checkpoint per model, which the first job writes.
        out: file of the results: model -> (metrics of the steps, weights, digest of the weights).
        words: flags.
        writes: make the checkpoints.
        with_offload: train once more and give the device memory back after every step: model ``NAME, offloaded``.
    """

    models: list[str]
    folder: str
    out: str
    words: list[str] = field(default_factory=list)
    writes: bool = False
    with_offload: bool = False

    def run(self, kind: str) -> dict[str, Any]:
        """Run in a process whose accelerator is ``kind``."""
        command = [sys.executable, "-m", "slime.doctor.gpu_training", json.dumps(asdict(self))]
        env = os.environ | {"SLIME_ACCELERATOR": kind}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"three steps of {', '.join(self.models)} on {kind}: {done.stderr[-2000:]}")
        results: dict[str, Any] = torch.load(self.out, weights_only=False)
        return results


def three_steps(job: Job) -> None:
    """Body of the process of ``job``."""
    torch.set_num_threads(1)
    results = {}
    for model in job.models:
        path = f"{job.folder}/{model}"
        if job.writes:
            _write_weights(write_model(path, TINY_MODELS[model]), ["--fp32"])
        for offloads in (False, True)[: 1 + job.with_offload]:
            results[f"{model}, offloaded" if offloads else model] = _three_steps(path, job.words, offloads=offloads)
    torch.save(results, job.out)


def _write_weights(path: str, words: Sequence[str]) -> None:
    from safetensors.torch import save_file

    tensors = _weights(start_random(path, words, scale=0.15, noise=0.1))
    save_file(tensors, f"{path}/model.safetensors", metadata={"format": "pt"})


def _weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().cpu().clone() for name, value in trainer.export_weights()}


def _three_steps(path: str, words: Sequence[str], *, offloads: bool) -> tuple[list[Any], dict[str, torch.Tensor], str]:
    trainer = start_trainer(path, ["--use-kl-loss", "--kl-loss-coef", "0.1", *words], with_ref=True)
    steps: list[Any] = []
    for rollout in range(_STEPS):
        steps += trainer.train(rollout, _tiny_batch(rollout)).steps
        if offloads:
            trainer.offload()
            trainer.onload()
    weights = {name: value.float() for name, value in _weights(trainer).items()}
    content = b"".join(value.numpy().tobytes() for _, value in sorted(weights.items()))
    return steps, weights, hashlib.sha256(content).hexdigest()


def parity(is_small: bool) -> Iterator[Result]:
    """The same three GRPO steps with a KL penalty on CPU and on CUDA, in fp32: losses, norms and weights."""
    models = list(TINY_MODELS)
    with tempfile.TemporaryDirectory() as folder:
        on_cpu = Job(models, folder, f"{folder}/cpu.pt", ["--fp32"], writes=True).run("cpu")
        kind = accelerator.current().name
        other = on_cpu if kind == "cpu" else Job(models, folder, f"{folder}/{kind}.pt", ["--fp32"]).run(kind)
    for model in models:
        (steps, weights, _), (other_steps, other_weights, _) = on_cpu[model], other[model]
        figures = {name: [step[name] for step in steps] for name in ("loss", "grad_norm")}
        numbers = [number for values in figures.values() for number in values]
        is_good = len(steps) == _STEPS and all(map(math.isfinite, numbers)) and min(figures["grad_norm"]) > 0
        yield judged(
            f"parity.{model}.steps", is_good, "three steps on the CPU have finite losses and a gradient", figures
        )
        difference: dict[str, float] = {}
        if kind != "cpu":
            for name, values in figures.items():
                pairs = zip(values, (step[name] for step in other_steps), strict=True)
                difference[name] = max(abs(one - other) / max(1.0, abs(one)) for one, other in pairs)
            difference["weights"] = max(relative(other_weights[name], weights[name]) for name in weights)
        yield judged_on_cuda(
            f"parity.{model}.cuda",
            lambda found=difference: max(found.values()) < 5e-4,  # type: ignore[misc]
            "losses, norms and the norm of every weight's difference are those of the CPU to 5e-4",
            difference,
        )


def transformer_engine(is_small: bool) -> Iterator[Result]:
    """A GRPO step with local layers and with Transformer Engine's, in bfloat16, and the checkpoints of both."""
    impls = ("local", "transformer_engine")
    words = {impl: ["--bf16", "--transformer-impl", impl] for impl in impls}
    missing = list(low_precision_here(trainer_args("", words["transformer_engine"])))
    if importlib.util.find_spec("xxhash") is None:
        missing.append("a checkpoint has checksums, and the package xxhash is not installed.")
    same, loads = "numbers of both differ by less than 5 %", "either loads the bits of the other's checkpoint"
    for model, settings in TINY_MODELS.items():
        if missing:
            yield Result(f"transformer_engine.{model}", "skipped", missing[0])
            continue
        with tempfile.TemporaryDirectory() as folder:
            path = write_model(f"{folder}/model", settings)
            _write_weights(path, ["--bf16"])
            steps, weights = {}, {}
            for impl in impls:
                trainer = start_trainer(path, [*words[impl], "--save", f"{folder}/{impl}"])
                steps[impl] = trainer.train(0, _tiny_batch(0)).steps[0]
                trainer.save(0)
                weights[impl] = _weights(trainer)
            are_equal = []
            for impl, other in (impls, impls[::-1]):
                loaded = _weights(start_trainer(path, [*words[impl], "--load", f"{folder}/{other}"]))
                are_equal.append(all(torch.equal(value, weights[other][name]) for name, value in loaded.items()))
        names = ("loss", "grad_norm", "train_rollout_logprob_abs_diff")
        pairs = {name: tuple(steps[impl][name] for impl in impls) for name in names}
        difference = max(abs(one - other) / max(1.0, abs(one)) for one, other in pairs.values())
        yield judged(f"transformer_engine.{model}.step", difference < 5e-2, same, pairs)
        yield judged(f"transformer_engine.{model}.checkpoint", all(are_equal), loads, {"tensors": len(loaded)})


def determinism(is_small: bool) -> Iterator[Result]:
    """``--deterministic-mode`` in bfloat16: the same bits in two runs, and with an offload after every step."""
    models = ["dense"] if is_small else list(TINY_MODELS)
    kind = accelerator.current().name
    words = ["--bf16", "--deterministic-mode"]
    with tempfile.TemporaryDirectory() as folder:
        first = Job(models, folder, f"{folder}/first.pt", words, writes=True, with_offload=True).run(kind)
        second = Job(models, folder, f"{folder}/second.pt", words).run(kind)
    for model in models:
        one, other, offloaded = first[model][2], second[model][2], first[f"{model}, offloaded"][2]
        digests = {"digest": one[:16]}
        yield judged(f"determinism.{model}.repeated", one == other, "two runs have the same bits", digests)
        rule = "a run that gives its memory back after every step has the same bits"
        yield judged(f"determinism.{model}.offloaded", one == offloaded, rule, digests)


if __name__ == "__main__":
    three_steps(Job(**json.loads(sys.argv[1])))
