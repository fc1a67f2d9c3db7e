"""What interleaved pipeline stages of megatron-core 0.16.1 need on gloo.

Applied by :func:`slime.backends.megatron_utils.patches.install.install`, never at import.
"""

from __future__ import annotations

from typing import Any

__all__ = ["repair_overlapped_sends_on_cpu"]


def repair_overlapped_sends_on_cpu() -> None:
    """An interleaved stage gives up the memory of an output that gloo has not sent yet.

    Why: ``deallocate_output_tensor`` replaces the ``.data`` of an output before its ``isend`` has been waited for. gloo
    keeps the tensor, not its memory, and reads it from a thread of its own once the receiver is ready: silently,
    whatever has been written there since. It needs a loaded machine, so that this thread is late. A second tensor that
    shares the memory keeps it until the send is done.
    Upstream: core_v0.16.1, with ``overlap_p2p_comm``. Delete when outputs are given up after the wait.
    """
    from megatron.core.pipeline_parallel import p2p_communication

    stock = p2p_communication._p2p_ops

    def exchange(*, tensor_send_prev: Any, tensor_send_next: Any, **others: Any) -> Any:
        held = [None if tensor is None else tensor.detach() for tensor in (tensor_send_prev, tensor_send_next)]
        return stock(tensor_send_prev=held[0], tensor_send_next=held[1], **others)

    p2p_communication._p2p_ops = exchange
