"""The checks of ``slime doctor --gpu`` that need no trainer: packages, attention, log-probs, and handing memory over.

Each function is a section: it yields one :class:`Result` per check. ``gpu_check`` runs every section in a new process.
"""

from __future__ import annotations

import base64
import importlib.metadata
import multiprocessing
import pickle
import platform
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import psutil
import torch
from torch.multiprocessing import reductions

from slime.algorithms.arguments import CUDA_CHUNK_ROWS
from slime.algorithms.logprobs import log_probs_and_entropy
from slime.backends.training.attention import AttentionPlan, packed_attention, plan_attention
from slime.backends.training.context_parallel import zigzag_rows
from slime.utils import accelerator
from slime.weight_sync.chunks import WeightChunk
from slime.weight_sync.send_tensor import handle_of, payloads, shareable

Outcome = Literal["pass", "fail", "skipped"]
_NO_DEVICE = "this needs a CUDA device, and the process runs on the CPU"
_LONG_ENOUGH_S = 60.0


@dataclass(frozen=True)
class Result:
    """One line of the output.

    Attributes:
        reason: the rule, with its limit, or the requirement that is not met.
    """

    check: str
    status: Outcome
    reason: str
    figures: dict[str, Any] = field(default_factory=dict)


def judged(check: str, is_good: bool, rule: str, figures: dict[str, Any]) -> Result:
    return Result(check, "pass" if is_good else "fail", rule, figures)


def judged_on_cuda(check: str, is_good: Callable[[], bool], rule: str, figures: dict[str, Any]) -> Result:
    """A check whose rule holds for CUDA only. On a CPU its figures are shown and not judged."""
    if accelerator.current().is_cpu:
        return Result(check, "skipped", f"{_NO_DEVICE}: {rule}", figures)
    return judged(check, is_good(), rule, figures)


def gib(num_bytes: float) -> float:
    return round(num_bytes / 2**30, 3)


def relative(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Norm of the difference by the norm of the reference, in fp64."""
    wanted = reference.double()
    return float((value.double() - wanted).norm() / wanted.norm().clamp(min=1e-30))


def peak_bytes(work: Callable[[], object]) -> int:
    """The most device memory that ``work`` holds at once beyond the memory that is held before."""
    device = accelerator.current()
    if not device.is_cpu:
        device.synchronize()
        device.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = device.memory_allocated()
        work()
        device.synchronize()
        return int(torch.cuda.max_memory_allocated() - before)
    # torch counts no memory on a CPU, but its profiler sees every allocation
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events: Any = profiler.profiler
    held = most = 0
    for event in events.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


class HostPeak:
    """The most resident memory of this process while the block runs, in bytes above its start."""

    def __enter__(self) -> HostPeak:
        self._process = psutil.Process()
        self._start = self.peak = self._process.memory_info().rss
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        # Samples every 5 ms: a shorter peak is missed.
        while not self._is_done.wait(0.005):
            self.peak = max(self.peak, self._process.memory_info().rss)

    def __exit__(self, *error: object) -> None:
        self._is_done.set()
        self._thread.join()
        self.peak = max(self.peak, self._process.memory_info().rss) - self._start


# ----------------------------------------------------------------------------------------------- environment


def environment(is_small: bool) -> Iterator[Result]:
    """Versions of packages and device. The versions that the trainer was written for are in pyproject.toml."""
    names = ("torch", "triton", "transformers", "megatron-core", "transformer-engine", "ray", "sglang")
    figures: dict[str, Any] = {"python": platform.python_version()}
    figures |= {name: _version(name) for name in names}
    has_needed = figures["megatron-core"] is not None
    yield judged("environment.packages", has_needed, "torch and megatron-core are installed", figures)
    found: dict[str, Any] = {}
    if not accelerator.current().is_cpu:
        one = torch.cuda.get_device_properties(0)
        free, total = torch.cuda.mem_get_info()
        found = {"name": one.name, "sm": [one.major, one.minor], "processors": one.multi_processor_count}
        found |= {"memory_gib": gib(total), "free_gib": gib(free), "devices": torch.cuda.device_count()}
    yield judged_on_cuda(
        "environment.device",
        lambda: found["sm"] >= [8, 0] and found["free_gib"] > 0.9 * found["memory_gib"],
        "the device computes in bfloat16 (capability 8.0) and 90 % of its memory is free",
        found,
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# ------------------------------------------------------------------------------------------------- attention

# (query heads, key groups, width of queries and keys, width of values): usual, latent, widest, narrow.
_HEADS = ((8, 2, 128, 128), (4, 4, 192, 128), (4, 1, 256, 256), (14, 2, 64, 64))


def attention(is_small: bool) -> Iterator[Result]:
    """Packed attention and its gradients against fp64: both kernels, grouped heads, parts of context-parallel ranks."""
    lengths = [8, 64, 136, 24, 40] if is_small else [8, 1024, 304, 2048, 40]
    limits = ((torch.float32, 1e-5), (torch.bfloat16, 2e-2))
    for dtype, limit in limits:
        worst = {
            f"heads {heads}/{groups}, width {wide}/{narrow}, cp {ranks}": _worst_of_ranks(
                dtype, lengths, (heads, groups, wide, narrow), ranks
            )
            for heads, groups, wide, narrow in (_HEADS[:2] if is_small else _HEADS)
            for ranks in (1, 2)
        }
        rule = f"outputs and gradients in {dtype} differ from fp64 by at most {limit:g} of their norm"
        is_good = max(worst.values()) <= limit
        if dtype == torch.float32:
            yield judged("attention.padded", is_good, rule, worst)
        else:
            # bool of the whole table is decided on the host: nothing is computed again
            yield judged_on_cuda("attention.varlen_kernel", lambda good=is_good: good, rule, worst)  # type: ignore[misc]


def _worst_of_ranks(dtype: torch.dtype, lengths: Sequence[int], heads: tuple[int, int, int, int], ranks: int) -> float:
    """The largest relative difference of any output or gradient, over the ranks that share the sequences."""
    device = accelerator.current().device()
    generator = torch.Generator().manual_seed(0)
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)
    num_heads, groups, wide, narrow = heads
    shapes = ((num_heads, wide), (groups, wide), (groups, narrow))
    values = [torch.randn(sum(lengths), *shape, generator=generator).to(device, dtype) for shape in shapes]
    rows = [zigzag_rows(bounds, rank, ranks) for rank in range(ranks)]
    worst = 0.0
    for rank in range(ranks):
        plan = plan_attention(bounds, rank, ranks)
        leaves = [value.detach().clone().requires_grad_() for value in values]
        gold = [value.detach().double().requires_grad_() for value in values]
        query, key, value = leaves
        if ranks > 1:  # without a group nothing is gathered: the keys are given as they lie after the gather
            order = torch.cat(rows)
            query, key, value = leaves[0][rows[rank]], leaves[1][order], leaves[2][order]
        out = packed_attention(query, key, value, plan, scale=wide**-0.5)
        expected = _exact(gold[0] if ranks == 1 else gold[0][rows[rank]], gold[1], gold[2], plan, wide**-0.5)
        gradient = torch.randn(expected.shape, generator=generator).to(device, dtype)
        out.backward(gradient)
        expected.backward(gradient.double())
        pairs = [(out, expected), *((mine.grad, exact.grad) for mine, exact in zip(leaves, gold, strict=True))]
        worst = max(worst, *(relative(mine.detach(), exact.detach()) for mine, exact in pairs))  # type: ignore[union-attr]
    return worst


def _exact(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: AttentionPlan, scale: float
) -> torch.Tensor:
    """``softmax(q k^T scale) v`` in fp64, piece after piece of the plan."""
    copies = query.size(1) // key.size(1)
    parts = []
    for piece in plan.pieces:
        q = query[piece.q_begin : piece.q_begin + piece.q_length]
        rows = slice(piece.k_begin, piece.k_begin + piece.k_length)
        k, v = (x[rows].repeat_interleave(copies, 1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        last = torch.arange(piece.q_length, device=q.device)[:, None] + piece.k_length - piece.q_length
        scores = scores.masked_fill(torch.arange(piece.k_length, device=q.device) > last, -torch.inf)
        parts.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
    return torch.cat(parts)  # the pieces of a plan are in the order of its rows


# ------------------------------------------------------------------------------------------------- log-probs


@dataclass(frozen=True)
class LogProbMemory:
    """Memory of log-probs and entropies by one fp32 chunk ``[chunk, vocabulary]``, and the error of their values.

    Attributes:
        forward: most memory of a pass without gradients, in chunks.
        training: most memory of forward and backward passes beyond the gradient of the logits, in chunks.
        error: largest difference to fp64.
        seconds: of a forward and a backward pass.
    """

    forward: float
    training: float
    error: float
    seconds: float


def log_prob_memory(rows: int, vocabulary: int, chunk: int) -> LogProbMemory:
    """Measure log-probs and entropies of bfloat16 logits, ``chunk`` rows at a time."""
    device = accelerator.current().device()
    generator = torch.Generator(device=device).manual_seed(0)
    logits = torch.randn(rows, vocabulary, device=device, dtype=torch.bfloat16, generator=generator).mul_(3)
    targets = torch.randint(0, vocabulary, (rows,), device=device, generator=generator)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        log_probs, entropy = log_probs_and_entropy(logits, targets, chunk_size=chunk, with_entropy=True)
        assert entropy is not None
        return log_probs, entropy

    def train() -> None:
        logits.grad = None
        torch.cat(run()).sum().backward()  # type: ignore[no-untyped-call]

    chunk_bytes = chunk * vocabulary * 4
    values, _ = run()
    in_forward = peak_bytes(run)
    logits.requires_grad_()
    in_training = peak_bytes(train) - logits.nbytes
    started = time.monotonic()
    train()
    accelerator.current().synchronize()
    seconds = time.monotonic() - started
    few = slice(-min(rows, 64), None)  # the last: their offsets exceed 2^31
    exact = torch.log_softmax(logits.detach()[few].double(), -1).gather(1, targets[few, None]).squeeze(1)
    error = float((values[few].double() - exact).abs().max())
    return LogProbMemory(in_forward / chunk_bytes, in_training / chunk_bytes, error, seconds)


def logprobs(is_small: bool) -> Iterator[Result]:
    """Values against fp64 and peak memory, at a vocabulary of 152k and the default chunk on CUDA."""
    rows, vocabulary, chunk = (256, 5000, 64) if is_small else (16384, 151936, CUDA_CHUNK_ROWS)
    found = log_prob_memory(rows, vocabulary, chunk)
    sizes = {"rows": rows, "vocabulary": vocabulary, "chunk": chunk, "chunk_gib": gib(chunk * vocabulary * 4)}
    rule = "log-probs differ from fp64 by < 1e-4"
    yield judged("logprobs.values", found.error < 1e-4, rule, {**sizes, "error": found.error, "s": found.seconds})
    chunks = {"forward_chunks": found.forward, "training_chunks": found.training}
    rule = "log-probs and entropies take at most 1.2 fp32 chunks beyond the logits and their gradient"
    yield judged("logprobs.memory", max(chunks.values()) <= 1.2, rule, sizes | chunks)


# ------------------------------------------------------------------------------------- memory of other processes


def ipc(is_small: bool) -> Iterator[Result]:
    """A bucket of weights reaches another process as an engine opens it, and its memory is free afterwards."""
    size = 64 if is_small else 8192
    device = accelerator.current()
    tensors = [
        ("narrow.weight", torch.randn(7, device=device.device())),
        ("wide.weight", torch.randn(size, size, device=device.device(), dtype=torch.bfloat16)),
    ]
    chunk = WeightChunk(tensors)
    wanted = {name: _sum(tensor) for name, tensor in tensors}
    device.synchronize()
    before = device.memory_allocated()
    flat = shareable(chunk)
    held = device.memory_allocated() - before
    [text] = payloads(chunk, [handle_of(flat)])
    started = time.monotonic()
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=_open_payload, args=(text, there))
    child.start()
    opened, sums = here.recv() if here.poll(_LONG_ENOUGH_S) else ("no answer", {})
    seconds = time.monotonic() - started
    here.send("close")
    child.join(_LONG_ENOUGH_S)
    if child.is_alive():
        child.kill()
    del flat
    device.give_back_shared()
    device.empty_cache()
    left = device.memory_allocated() - before
    figures = {"opened_on": opened, "text_bytes": len(text), "bucket_gib": gib(chunk.num_bytes), "s": round(seconds, 2)}
    rule = "another process reads the same numbers from the payload of a bucket"
    is_same = sums == wanted
    if device.is_cpu:
        yield judged("ipc.shared_memory", is_same, rule, figures)
        yield Result("ipc.cuda_handle", "skipped", _NO_DEVICE)
        return
    yield judged("ipc.cuda_handle", is_same, rule, figures)
    yield judged(
        "ipc.memory", held > 0 and left == 0, "no byte of the bucket is held after it was closed", {"left": left}
    )


def _sum(tensor: torch.Tensor) -> float:
    return float(tensor.double().sum().cpu())


def _open_payload(text: str, pipe: Any) -> None:
    """The part of an engine that opens a payload, in a process without SGLang."""
    rebuild = reductions.rebuild_cuda_tensor

    def by_uuid(*arguments: Any) -> Any:
        """SGLang replaces torch's function in the same way, because payloads name the device by its UUID."""
        for number in range(torch.cuda.device_count()):
            if str(torch.cuda.get_device_properties(number).uuid) == arguments[6]:
                arguments = (*arguments[:6], number, *arguments[7:])
        return rebuild(*arguments)  # type: ignore[no-untyped-call]

    reductions.rebuild_cuda_tensor = by_uuid
    content = pickle.loads(base64.b64decode(text))
    flat = content["flattened_tensor"]
    sums = {
        one.name: _sum(flat[one.start_idx : one.end_idx].view(one.dtype).view(one.shape)) for one in content["metadata"]
    }
    pipe.send((str(flat.device), sums))
    pipe.recv()
