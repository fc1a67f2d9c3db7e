"""The adapter under which engines serve a LoRA policy: every request of a run names it through :func:`adapter_fields`.

It has one name in the whole run, because a request may wait while engines take new weights: engines replace the adapter
of this name, and the request is answered by the new one. The reply has its version (``weight_version``).
"""

from __future__ import annotations

from typing import Any

ADAPTER_NAME = "policy"


def serves_adapter(args: Any) -> bool:
    """Whether engines get an adapter. With ``--lora-merge`` they get whole weights, without a trainer nothing."""
    given = {} if args is None else vars(args)  # those of users' programs may lack the flags
    return bool(given.get("lora_rank")) and not given.get("lora_merge") and not given.get("debug_rollout_only")


def adapter_fields(args: Any) -> dict[str, str]:
    """The fields by which a request to ``/generate`` of the trained model names the adapter. Empty without one."""
    return {"lora_path": ADAPTER_NAME} if serves_adapter(args) else {}
