"""Function hooks, applied in every SGLang process through the entry point group ``sglang.srt.plugins``."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from slime.utils import accelerator

_NAP_MS = 20


def register() -> None:
    """Install the hooks of this device."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.add_external_corpus",
        add_tokens,
        HookType.AROUND,
    )
    HookRegistry.register(
        "sglang.srt.speculative.external_corpus_manager.ExternalCorpusManager.add", load_at_once, HookType.AFTER
    )
    if not accelerator.current().is_cpu:
        # Every weight sync flushes the caches, and SGLang 0.5.23 forgets its n-grams then.
        HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.flush_cache", keep_drafts, HookType.BEFORE)
        return
    # A paused scheduler polls without sleeping, --sleep-on-idle or not, and takes a core from the trainer that is
    # about to send weights. SGLang 0.5.23; delete when the idle sleeper covers the paused state.
    HookRegistry.register(
        "sglang.srt.managers.scheduler.Scheduler._record_scheduler_state_for_paused_engine", _nap, HookType.AFTER
    )
    HookRegistry.register(
        "sglang.srt.utils.torch_memory_saver_adapter.TorchMemorySaverAdapter.create",
        _create_memory_saver,
        HookType.AROUND,
    )
    HookRegistry.register("sglang.srt.lora.lora_manager.LoRAManager.__init__", _use_ordinary_memory, HookType.BEFORE)
    # SHA-256 of all weights would take most of the time of a sync
    HookRegistry.register("sglang.srt.utils.weight_checker._hash_tensor", _checksum, HookType.REPLACE)


def keep_drafts(scheduler: Any, *_: Any, **__: Any) -> None:
    """Keep the n-grams of responses of older weights as drafts: each draft is verified by the current weights.

    With deterministic inference they are forgotten. There the tokens of a seed depend on the drafts, and an engine of a
    resumed run has none.
    """
    if scheduler.spec_algorithm.is_ngram() and not scheduler.server_args.enable_deterministic_inference:
        scheduler.draft_worker.clear_cache_pool = lambda: None


async def add_tokens(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Accept a corpus of token ids (``slime/rollout/prompt_history.py``).

    SGLang 0.5.23 accepts texts alone. Their tokens may differ from those that were sampled, and to find them would hold
    up the replies to all requests.
    """
    from sglang.srt.managers.io_struct import AddExternalCorpusReqOutput
    from sglang.srt.runtime_context import get_spec

    spec = get_spec()
    if request.token_chunks is None or spec.speculative_algorithm != "NGRAM":
        return await original(manager, request)
    if reason := _refusal(spec, manager.server_args):
        return AddExternalCorpusReqOutput(success=False, message=reason)
    manager.auto_create_handle_loop()
    replies = await manager.add_external_corpus_communicator(request)
    return next((reply for reply in replies if not reply.success), replies[0])


def _refusal(spec: Any, server_args: Any) -> str:
    if accelerator.current().is_cpu:
        return ""
    if server_args.enable_deterministic_inference:
        return "with deterministic inference the tokens of a seed depend on the drafts"
    if not spec.speculative_ngram_external_sam_budget:
        return (
            "--sglang-speculative-ngram-external-sam-budget is 0, so no draft is taken from them. Set it to a part of "
            f"--sglang-speculative-num-draft-tokens ({spec.speculative_num_draft_tokens})"
        )
    return ""


def load_at_once(result: Any, manager: Any, *_: Any, **__: Any) -> None:
    """Wait for the thread that loads a corpus.

    SGLang 0.5.23 uses a corpus as soon as its thread is ready. The ranks of a tensor-parallel engine would verify
    different drafts of one batch. They receive the request in the same step, so after the wait all have the corpus.
    """
    if manager._pending_load is not None:
        manager._pending_load[1].join()
        manager.check_pending_load()


def _create_memory_saver(original: Callable[..., Any], enable: bool) -> Any:
    from slime.backends.sglang_utils.cpu_platform.memory_saver import CpuMemorySaver  # SGLang is imported by now

    return CpuMemorySaver() if enable else original(enable)


def _checksum(tensor: torch.Tensor) -> str:
    from slime.backends.sglang_utils.checksum import HostHash

    hasher = HostHash()
    hasher.add(tensor[None])
    return hasher.digests()[0]


def _nap(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    if scheduler.idle_sleeper is not None:
        scheduler.idle_sleeper.poller.poll(_NAP_MS)  # returns at once when a request arrives
    else:
        time.sleep(0.002)


class _HostTorch:
    """``torch`` for a module that asks for pinned memory, which needs a GPU: its tensors are in ordinary memory."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def tensor(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return torch.tensor(*args, **kwargs)

    @staticmethod
    def zeros(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(*args, **kwargs)


def _use_ordinary_memory(*_: Any, **__: Any) -> None:
    """Keep offsets and ranks of adapters in ordinary memory. Idempotent. SGLang 0.5.23 always pins them."""
    from sglang.srt.lora import layers
    from sglang.srt.lora.backend import torch_backend

    host: Any = _HostTorch()
    layers.torch = torch_backend.torch = host
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
