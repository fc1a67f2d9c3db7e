"""Functions that two pipeline stages run in the tests of their exchange."""

from __future__ import annotations

import time
from types import SimpleNamespace

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import deallocate_output_tensor

_SHAPE = (50, 1, 32)


def send_and_give_up(rank: int, world_size: int) -> list[float]:
    """Send 7 from the first stage, release the memory and write into it, as Megatron's interleaved schedule does. The
    second is late to receive. Returns the values that each stage received."""
    dist.init_process_group("gloo")
    config = SimpleNamespace(
        variable_seq_lengths=False,
        mtp_standalone=False,
        pipeline_dtype=torch.float32,
        use_ring_exchange_p2p=False,
        batch_p2p_comm=False,
        batch_p2p_sync=False,
        timers=None,
        virtual_pipeline_model_parallel_size=2,
    )
    stages = P2PCommunicator(dist.group.WORLD, config)
    dist.barrier()
    exchange = {"tensor_shape": _SHAPE, "overlap_p2p_comm": True}
    if rank == 0:
        output = torch.full(_SHAPE, 7.0)
        _, handles = stages.send_forward_recv_forward(output, recv_prev=False, **exchange)
        deallocate_output_tensor(output, True)
        others = [torch.zeros(_SHAPE) for _ in range(16)]
        handles["send_next"].wait()
        return [float(other.max()) for other in others]
    time.sleep(0.2)
    received, handles = stages.send_forward_recv_forward(None, recv_prev=True, **exchange)
    handles["recv_prev"].wait()
    return received.detach().unique().tolist()
