"""One SGLang server as SGLang starts it, guarded: ``python -m slime.backends.sglang_utils.launch <server flags>``."""

from __future__ import annotations

import os
import sys

from slime.utils.process import watch_owner
from slime.utils.torchvision_cpu import install as allow_torchvision_on_cpu

__all__ = ["forget_allocator_settings", "main"]


def forget_allocator_settings() -> None:
    """Drop what tunes the trainer's CUDA allocator: SGLang's memory saver does not work with expandable segments."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        os.environ.pop(name, None)


def main() -> None:
    watch_owner()
    forget_allocator_settings()
    allow_torchvision_on_cpu()
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    launch_server(prepare_server_args(sys.argv[1:]))


if __name__ == "__main__":
    main()
