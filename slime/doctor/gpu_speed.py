"""The checks of ``slime doctor --gpu`` that measure memory and time of a large trainer: offload, checkpoint, optimizer,
steps, and the payload of a weight update. ``--small`` takes a tiny model. Sections are listed in ``gpu_check``.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from slime.doctor.gpu_kernels import HostPeak, Result, gib, judged, judged_on_cuda, peak_bytes, relative
from slime.doctor.gpu_training import (
    LARGE_MODELS,
    TINY_MODELS,
    make_batch,
    num_weights,
    start_random,
    start_trainer,
    write_model,
)
from slime.models.cost import calculate_fwd_flops, num_active
from slime.models.hf_shape import read_shape
from slime.utils import accelerator
from slime.utils.errors import ConfigError
from slime.weight_sync.chunks import into_chunks
from slime.weight_sync.send_tensor import handle_of, payloads, shareable

_DENSE, _MOE = LARGE_MODELS
_RECOMPUTE = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
_BUCKET_BYTES = 512 * 1024**2
# Bytes of random weights of a tiny model say nothing about bytes per weight: buffers of fixed size dominate them.
_FEW_WEIGHTS = 10_000_000
_TOP_KERNELS = 12
_LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def _directory(folder: str, name: str, is_small: bool, layers: int | None = None) -> str:
    """The ``config.json`` of the large model ``name``, or of the tiny one of the same kind, in ``folder``."""
    settings = TINY_MODELS["moe" if name == _MOE else "dense"] if is_small else LARGE_MODELS[name]
    if layers is not None and not is_small:
        settings = settings | {"num_hidden_layers": layers}
    return write_model(folder, settings)


def _batch(is_small: bool, *, num_samples: int = 16, response: int = 1920, per_micro_batch: int = 4) -> dict[str, Any]:
    """Samples of one length. By default 4 micro-batches of 8192 tokens."""
    if is_small:
        return make_batch(4, 61, lambda index: (8, 24), per_micro_batch=2)
    return make_batch(num_samples, 151936, lambda index: (128, response), per_micro_batch=per_micro_batch)


def _seconds(work: Callable[[], object]) -> float:
    accelerator.current().synchronize()
    started = time.monotonic()
    work()
    accelerator.current().synchronize()
    return time.monotonic() - started


def _held() -> int:
    """Bytes of the device that all processes hold, as the driver counts them. 0 on a CPU."""
    if accelerator.current().is_cpu:
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def _held_by_smi() -> float | None:
    """GiB of the device that ``nvidia-smi`` shows as used. None if it is not installed or does not answer."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        return round(float(done.stdout.splitlines()[accelerator.current().device().index or 0]) / 1024, 3)
    except (OSError, ValueError, IndexError, subprocess.SubprocessError):
        return None


# ------------------------------------------------------------------------------------------------------- memory


def offload(is_small: bool) -> Iterator[Result]:
    """Giving the device memory back: how much, how fast, as ``nvidia-smi`` sees it, and the same bits afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = start_random(_directory(folder, _DENSE, is_small), ["--bf16"])
    trainer.train(0, _batch(is_small, num_samples=4))
    before = {name: tensor.detach().cpu().clone() for name, tensor in trainer.export_weights()}
    held, held_by_smi = _held(), _held_by_smi()
    first = _seconds(trainer.offload)
    left, left_by_smi = _held(), _held_by_smi()
    back = _seconds(trainer.onload)
    again = _seconds(trainer.offload)
    trainer.onload()
    same = all(torch.equal(tensor.cpu(), before[name]) for name, tensor in trainer.export_weights())
    yield judged("offload.bits", same, "weights are the same bits after offload and onload", {"tensors": len(before)})
    returned = held - left
    weights = num_weights(trainer)
    figures = {"held_gib": gib(held), "left_gib": gib(left), "smi_held_gib": held_by_smi, "smi_left_gib": left_by_smi}
    yield judged_on_cuda(
        "offload.memory",
        lambda: returned >= 0.95 * 18 * weights,  # 2 of weights, 4 of gradients, 12 of the optimizer
        "the driver gets 18 bytes per weight back, less 5 %",
        figures | {"bytes_per_weight": round(returned / weights, 2)},
    )
    rate = 14 * weights / again / 1e9  # gradients are not copied
    yield judged_on_cuda(
        "offload.speed",
        lambda: rate >= 20,
        "a second offload copies at least 20 GB/s to pinned memory",
        {"first_s": round(first, 2), "again_s": round(again, 2), "onload_s": round(back, 2), "GB/s": round(rate, 1)},
    )
    yield _communicators(trainer, left)


def _communicators(trainer: Any, left: int) -> Result:
    """``--offload-communicators``: device memory that is left beside it, and sums over ranks afterwards."""
    check = "offload.communicators"
    try:
        trainer._device.take_communicators()
    except ConfigError as error:
        return Result(check, "skipped", str(error))
    trainer.offload()
    suspended = _held()
    trainer.onload()
    number = torch.ones(1, device=accelerator.current().device())
    torch.distributed.all_reduce(number)
    is_right = float(number) == torch.distributed.get_world_size()
    return judged_on_cuda(
        check,
        lambda: is_right and suspended <= left,
        "ranks compute a sum after NCCL gave its memory up and took it back",
        {"left_gib": gib(left), "suspended_gib": gib(suspended)},
    )


def save(is_small: bool) -> Iterator[Result]:
    """A checkpoint: memory beyond the model while it is written, and the same weights from it in another trainer."""
    if importlib.util.find_spec("xxhash") is None:
        for check in ("save.bits", "save.memory"):
            yield Result(check, "skipped", "a checkpoint has checksums, and the package xxhash is not installed")
        return
    with tempfile.TemporaryDirectory() as folder:
        directory = _directory(f"{folder}/model", _DENSE, is_small, layers=8)
        trainer = start_random(directory, ["--bf16", "--save", f"{folder}/saved"])
        trainer.train(0, _batch(is_small, num_samples=4))
        weights = num_weights(trainer)
        started = time.monotonic()
        with HostPeak() as host:
            extra = peak_bytes(lambda: trainer.save(0)) / weights
        seconds = time.monotonic() - started
        wanted = {name: tensor.detach().cpu().clone() for name, tensor in trainer.export_weights()}
        loaded = start_trainer(directory, ["--bf16", "--load", f"{folder}/saved"])
        same = all(torch.equal(tensor.cpu(), wanted[name]) for name, tensor in loaded.export_weights())
        size = sum(path.stat().st_size for path in Path(folder, "saved").rglob("*") if path.is_file())
    yield judged("save.bits", same, "another trainer loads the same bits", {"tensors": len(wanted)})
    extra_host = host.peak / weights
    figures = {"weights": weights, "device_bytes_per_weight": round(extra, 3), "s": round(seconds, 2)}
    figures |= {"host_bytes_per_weight": round(extra_host, 3), "files_gib": gib(size)}
    rule = "a checkpoint takes less than 1 byte of the device and at most 4 bytes of the host per weight"
    if weights < _FEW_WEIGHTS:
        yield Result("save.memory", "skipped", f"{weights} weights are too few to count bytes per weight: {rule}")
    else:
        yield judged_on_cuda("save.memory", lambda: extra < 1 and extra_host <= 4, rule, figures)


def optimizer(is_small: bool) -> Iterator[Result]:
    """``--optimizer-cpu-offload``: the weights of the optimizer on the device, and seconds per billion weights."""
    words = ["--bf16", "--optimizer-cpu-offload", "--use-precision-aware-optimizer"]
    batch = make_batch(4, 61, lambda index: (8, 24), per_micro_batch=4)
    with tempfile.TemporaryDirectory() as folder:
        directory = _directory(folder, _DENSE, is_small, layers=8)
        plain = start_random(directory, ["--bf16"])
        other = start_random(directory, words)
    differences = []
    for rollout in range(3):
        plain.train(rollout, dict(batch))
        other.train(rollout, dict(batch))
        kept = dict(plain.export_weights())
        differences.append(max(relative(tensor, kept[name]) for name, tensor in other.export_weights()))
    # Adam turns the rounding of small gradients into steps: two sound kernels give weights that differ by 2e-3
    is_good = differences[0] <= 1e-3 and max(differences) <= 1e-2
    rule = "a step gives the weights of the optimizer on the device to 1e-3 of their norm, and three to 1e-2"
    yield judged("optimizer.weights", is_good, rule, {"differences": differences})
    del plain, kept
    weights = num_weights(other)
    rate = min(_seconds(lambda: other.train(3, dict(batch))) for _ in range(3)) * 1e9 / weights
    figures = {"weights": weights, "cpus": os.cpu_count(), "s per 1e9": round(rate, 2)}
    rule = "a step of 128 tokens takes at most 1 s per 1e9 weights"
    yield judged_on_cuda("optimizer.speed", lambda: rate <= 1, rule, figures)


# -------------------------------------------------------------------------------------------------------- speed


def speed(is_small: bool) -> Iterator[Result]:
    """Steps of a model with 1.7 billion weights at full recomputation."""
    figures = _step_figures(_DENSE, is_small)
    rule = "a step does model FLOPs at 0.35 of the rate of a large product of matrices (recomputation is not counted)"
    yield judged_on_cuda("speed.dense", lambda: figures["mfu"] >= 0.35, rule, figures)


def moe_speed(is_small: bool) -> Iterator[Result]:
    """Steps of four layers with 128 experts: the device is busy, so that launches do not limit it."""
    figures = _step_figures(_MOE, is_small)
    rule = "kernels run in at least 0.9 of the time of a step"
    yield judged_on_cuda("moe_speed.busy", lambda: figures["busy_share"] >= 0.9, rule, figures)


def _step_figures(name: str, is_small: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        directory = _directory(folder, name, is_small)
        shape = read_shape(directory)
        trainer = start_random(directory, ["--bf16", *_RECOMPUTE])
    batch = _batch(is_small)
    lengths = [len(tokens) for tokens in batch["tokens"]]
    trainer.train(0, dict(batch))
    seconds = min(_seconds(lambda: trainer.train(1, dict(batch))) for _ in range(2))
    rate = _product_rate(256 if is_small else 8192)
    found = {"tokens": sum(lengths), "active_weights": num_active(shape), "s": round(seconds, 3)}
    found |= {"tokens_per_s": round(sum(lengths) / seconds), "product_tflops": round(rate / 1e12, 2)}
    # the backward pass costs two forward passes
    mfu = 3 * calculate_fwd_flops(lengths, shape) / seconds / rate
    return found | {"mfu": round(mfu, 3)} | _profile(lambda: trainer.train(2, dict(batch)), seconds)


def _product_rate(size: int) -> float:
    """bfloat16 operations per second of a product of two square matrices, the best of five."""
    left = torch.randn(size, size, device=accelerator.current().device(), dtype=torch.bfloat16)
    return 2 * size**3 / min(_seconds(lambda: left @ left) for _ in range(5))


def _profile(step: Callable[[], object], seconds: float) -> dict[str, Any]:
    """Kernels, launches and waits of ``step``, which takes ``seconds`` without the profiler."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if not accelerator.current().is_cpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        torch.cuda.reset_peak_memory_stats()
    with torch.profiler.profile(activities=activities) as profiler:
        step()
        accelerator.current().synchronize()
    events = profiler.key_averages()
    counts: dict[str, int] = {}
    for event in events:
        counts[event.key] = counts.get(event.key, 0) + event.count
    figures: dict[str, Any] = {
        "operators": sum(count for key, count in counts.items() if key.startswith("aten::")),
        "host_reads": counts.get("aten::_local_scalar_dense", 0),
    }
    if accelerator.current().is_cpu:
        return figures
    # operators repeat the time of their kernels: only the kernels themselves are added up
    kernels = [event for event in events if event.device_type.name == "CUDA"]
    kernels = [event for event in kernels if not event.is_user_annotation]
    kernels.sort(key=lambda event: -event.self_device_time_total)
    busy = sum(event.self_device_time_total for event in kernels) / 1e6
    return figures | {
        "busy_share": round(busy / seconds, 3),
        "launches": sum(counts.get(key, 0) for key in _LAUNCHES),
        "waits": sum(counts.get(key, 0) for key in _WAITS),
        "peak_gib": gib(torch.cuda.max_memory_allocated()),
        "top_ms": _longest(kernels),
        "waits_at": _waits_at(step),
    }


def _longest(kernels: Sequence[Any]) -> dict[str, float]:
    """Beginning of a kernel's name -> milliseconds of all kernels that begin so, the longest first."""
    found: Counter[str] = Counter()
    for event in kernels:
        found[event.key[:80]] += event.self_device_time_total / 1e3
    return {name: round(value, 2) for name, value in found.most_common(_TOP_KERNELS)}


def _waits_at(step: Callable[[], object]) -> dict[str, int]:
    """``file:line`` of ours and of Megatron that makes the host wait for the device -> how often, most first."""
    found: Counter[str] = Counter()

    def count(message: Warning | str, *_: Any, **__: Any) -> None:
        if "synchronizing" not in str(message):
            return
        frames = [frame for frame in traceback.extract_stack() if not frame.filename.startswith(torch.__path__[0])]
        lines = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames]
        found[lines[-3]] += 1  # the last two are of the warning

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = count
        torch.cuda.set_sync_debug_mode("warn")
        step()
        torch.cuda.set_sync_debug_mode("default")
    return dict(found.most_common(_TOP_KERNELS))


def payload(is_small: bool) -> Iterator[Result]:
    """Export of all weights into buckets that engines open: gigabytes per second, before an engine loads them."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = start_random(_directory(folder, _DENSE, is_small), ["--bf16"])
    sizes: list[int] = []

    def export() -> None:
        sizes.clear()
        for chunk in into_chunks(trainer.export_weights(), _BUCKET_BYTES):
            flat = shareable(chunk)
            # torch keeps the memory of a handle that was never opened until this process ends
            payloads(chunk, [handle_of(flat)])
            sizes.append(chunk.num_bytes)

    export()
    seconds = _seconds(export)
    rate = sum(sizes) / seconds / 1e9
    figures = {"gib": gib(sum(sizes)), "buckets": len(sizes), "s": round(seconds, 4), "GB/s": round(rate, 2)}
    num_bytes = sum(tensor.nbytes for _, tensor in trainer.export_weights())
    yield judged("payload.bytes", sum(sizes) == num_bytes, "the buckets hold every byte of the weights once", figures)
    rule = "weights are exported and laid out at 20 GB/s"
    yield judged_on_cuda("payload.speed", lambda: rate >= 20, rule, figures)
