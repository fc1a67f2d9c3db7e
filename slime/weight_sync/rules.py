"""Rules about how weights reach the engines.

Called by ``slime.ray.arguments`` after the flags are resolved. What a transport needs at all is checked by
``slime.config.check.cluster``.
"""

from __future__ import annotations

import importlib.util
import os
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from slime.config import notices
from slime.config.groups import flag_of
from slime.models.config_json import read_model_config
from slime.weight_sync.version_store import foreign_content

_ONLY_FILES = (
    "update_weight_disk_dir",
    "update_weight_disk_keep_files",
    "update_weight_local_checkpoint_dir",
    "update_weight_delta_checksum",
    "custom_update_weight_post_write_path",
)


_SENDABLE = ("fp8", "compressed-tensors")
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def _unused(args: Namespace) -> Iterator[str]:
    if args.update_weight_transport == "nccl":
        for name in _ONLY_FILES:
            if name in args.given:
                notices.warn(args, flag_of(name), "no effect: only --update-weight-transport disk reads it")
    if args.update_weight_mode == "full" and "update_weight_delta_encoding" in args.given:
        notices.warn(args, "--update-weight-delta-encoding", "no effect: only --update-weight-mode delta reads it")
    if args.update_weight_mode == "full" and args.update_weight_transport == "disk" and args.update_weight_changed_only:
        notices.warn(
            args,
            "--update-weight-changed-only",
            "no effect: full versions hold everything, see --update-weight-mode delta",
        )
    yield from ()


def _files(args: Namespace) -> Iterator[str]:
    shared, local = args.update_weight_disk_dir, args.update_weight_local_checkpoint_dir
    if args.update_weight_transport != "disk" or shared is None:
        return
    if problem := foreign_content(Path(shared)):
        yield problem
    if local is None:
        return
    if args.rollout_external_engine_addrs is not None:
        yield (
            f"--update-weight-local-checkpoint-dir {local} does not work with --rollout-external-engine-addrs: nobody "
            "keeps the copy on the hosts of engines that slime did not start. Use --update-weight-mode full without it."
        )


def _allocator(args: Namespace) -> Iterator[str]:
    """Engines on the trainer's GPUs open its memory; growing segments are opened by way of the sender's process."""
    if not args.colocate or args.update_weight_transport != "nccl" or args.debug_train_only or args.debug_rollout_only:
        return
    settings = {name: args.train_env_vars.get(name, os.environ.get(name, "")) for name in _ALLOCATOR}
    for name, value in settings.items():
        if "expandable_segments:true" in str(value).lower():
            notices.warn(
                args,
                "--colocate",
                f"{name}={value}: engines may open such memory of the trainer only where they may trace its process "
                "(CAP_SYS_PTRACE, kernel.yama.ptrace_scope 0); otherwise the first weight sync fails",
            )
    yield from ()


def _checksum_library(args: Namespace) -> Iterator[str]:
    uses = args.update_weight_transport == "disk" and args.update_weight_delta_checksum == "blake3"
    if uses and importlib.util.find_spec("blake3") is None:
        yield "--update-weight-delta-checksum blake3 needs the package blake3: pip install blake3, or use xxh3-128."


def _quantisation(args: Namespace) -> Iterator[str]:
    """What engines hold must be something that can be sent to them."""
    if args.debug_train_only or args.debug_rollout_only:
        return  # nothing is sent
    config = _quantization_config(args.hf_checkpoint)
    if config is None:
        if args.sglang_quantization not in (None, "unquant") and args.sglang_load_format != "flash_rl":
            yield (
                f"--sglang-quantization {args.sglang_quantization} does not work with --hf-checkpoint "
                f"{args.hf_checkpoint}, which is not quantised: SGLang replaces the parameters when it has quantised "
                "them, and cannot load new weights into them. Use a checkpoint that is quantised (fp8, "
                "compressed-tensors), or --sglang-load-format flash_rl where SGLang supports it for the model."
            )
        return
    method = config.get("quant_method")
    if method not in _SENDABLE:
        yield (
            f"--hf-checkpoint {args.hf_checkpoint} is quantised by quant_method {method}, in which weights cannot be "
            f"sent to engines: use a checkpoint of {' or '.join(_SENDABLE)}, or an unquantised one."
        )
    if args.check_weight_update_equal:
        yield (
            f"--check-weight-update-equal does not work with --hf-checkpoint {args.hf_checkpoint}, which is quantised "
            f"({method}): engines repack such weights, so there is nothing to compare with. Leave the flag out."
        )


def _quantization_config(hf_checkpoint: str | None) -> dict[str, Any] | None:
    """Of config.json; None where there is none, or no such file, which the checks report."""
    found = read_model_config(hf_checkpoint).get("quantization_config")
    return found if isinstance(found, dict) else None


RULES: tuple[Callable[[Namespace], Iterable[str]], ...] = (
    _unused,
    _files,
    _allocator,
    _checksum_library,
    _quantisation,
)
