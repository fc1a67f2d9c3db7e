"""Moves the shards of a bucket of tensors to the trainer ranks that need them.

    all ranks             shards go to the other pipeline stages, then a stage gathers them. Only the rank's own shards
                          cross from stage to stage, 1 / TP of a tensor or 1 / EP of the experts
    experts by blocks     the same, but the expert-parallel ranks exchange experts, so that each gets its block only
    source only           the owning stage gathers on its first rank, which sends to rank 0. Only one data-parallel copy
                          takes part

``recipients`` of :class:`Gather` chooses the row. The collectives are methods of :class:`Peers`, so that a class that
counts bytes can replace them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from slime.backends import Recipients
from slime.backends.megatron_utils.checkpoint.tensors import LocalTensor, ModelTensors, Owned, stored
from slime.backends.megatron_utils.precision import readable

_ALIGNMENT = 16  # bytes: a tensor of any dtype may begin there

# (tensor of the bucket, its expert-parallel rank, its shards in the order of tensor-parallel ranks)
Piece: TypeAlias = tuple[Owned, int, list[torch.Tensor]]


class Peers:
    """A process group. Buffers are flat, uint8, and on the device of the group's backend."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.size = int(group.size())
        self.rank = int(group.rank())
        self.members: Sequence[int] = dist.get_process_group_ranks(group)

    def all_gather(self, flat: torch.Tensor) -> torch.Tensor:
        """The buffers of all members, one after the other."""
        out = flat.new_empty(flat.numel() * self.size)
        dist.all_gather_into_tensor(out, flat, group=self._group)
        return out

    def gather(self, flat: torch.Tensor) -> torch.Tensor | None:
        """The buffers of all members on the first one, None on the others."""
        out = flat.new_empty(flat.numel() * self.size) if self.rank == 0 else None
        dist.gather(flat, None if out is None else list(out.chunk(self.size)), group=self._group, group_dst=0)
        return out

    def broadcast(self, flat: torch.Tensor, source: int) -> None:
        """Overwrite ``flat`` with the buffer of member ``source``."""
        dist.broadcast(flat, group=self._group, group_src=source)

    def to_first(self, flat: torch.Tensor, source: int) -> None:
        """Overwrite ``flat`` of the first member with that of member ``source``. Only these two call it."""
        # a batch uses the communicator of the group: single calls would create another one for each pair
        action, peer = (dist.irecv, source) if self.rank == 0 else (dist.isend, 0)
        for work in dist.batch_isend_irecv([dist.P2POp(action, flat, group=self._group, group_peer=peer)]):
            work.wait()

    def exchange(self, flat: torch.Tensor, give: Sequence[int], take: Sequence[int]) -> torch.Tensor:
        """Give ``give[k]`` bytes of ``flat`` to member k. Returns the ``take[k]`` bytes of every member k."""
        out = flat.new_empty(sum(take))
        dist.all_to_all_single(out, flat, list(take), list(give), group=self._group)
        return out


@dataclass(frozen=True)
class Groups:
    """The groups of one rank.

    Attributes:
        tensor, expert_tensor, expert: tensor parallelism, the same for experts, and expert parallelism.
        stages: ranks with the same coordinates in all pipeline stages.
        is_first_copy, is_first_expert_copy: whether the rank belongs to the data-parallel copy of rank 0.
    """

    tensor: Peers
    expert_tensor: Peers
    expert: Peers
    stages: Peers
    is_first_copy: bool = True
    is_first_expert_copy: bool = True


def groups_of_rank() -> Groups:
    """The groups of this rank, from Megatron."""
    return Groups(
        Peers(mpu.get_tensor_model_parallel_group()),
        Peers(mpu.get_expert_tensor_parallel_group()),
        Peers(mpu.get_expert_model_parallel_group()),
        Peers(mpu.get_pipeline_model_parallel_group()),
        is_first_copy=mpu.get_data_parallel_rank(with_context_parallel=True) == 0,
        is_first_expert_copy=mpu.get_expert_data_parallel_rank() == 0,
    )


@dataclass(frozen=True)
class Gather:
    """Gathers the tensors of one model. All ranks of the model use it with the same buckets and recipients.

    Attributes:
        read: the value of a rank's tensor, of the tensor's shape and dtype.
    """

    tensors: ModelTensors
    groups: Groups
    recipients: Recipients
    read: Callable[[LocalTensor], torch.Tensor] = stored

    def buckets(self, plan: Sequence[Owned], max_bytes: int) -> Iterator[list[Owned]]:
        """Neighbors in ``plan`` that are gathered alike, up to ``max_bytes`` on a rank that gets them."""
        bucket: list[Owned] = []
        num_bytes = 0
        for _, unit in groupby(self._by_kind(plan), key=self._unit):
            tensors = list(unit)
            size = sum(map(self._gathered_bytes, tensors))
            if bucket and (self._kind(bucket[-1]) != self._kind(tensors[0]) or num_bytes + size > max_bytes):
                yield bucket
                bucket, num_bytes = [], 0
            bucket += tensors
            num_bytes += size
        if bucket:
            yield bucket

    def pieces(self, bucket: Sequence[Owned]) -> Iterator[Piece]:
        """The tensors of ``bucket`` that this rank gets. A collective."""
        shards, experts = self._inside(bucket[0])
        if self.recipients.source_only:
            flat = self._to_source(bucket)
        elif self._is_by_block(bucket[0]):
            yield from self._blocks(bucket)
            return
        elif self.groups.stages.size * shards.size * experts.size == 1:
            # without a copy
            yield from ((owned, 0, [self._value(owned)]) for owned in bucket)
            return
        else:
            flat = self._across_stages(bucket)
            for group in (shards, experts):
                flat = flat if group.size == 1 else group.all_gather(flat)
        if flat is None:
            return
        rows = flat.view(experts.size, shards.size, -1)
        whole = [[_unflatten(row, bucket) for row in of_rank] for of_rank in rows]
        for index, owned in enumerate(bucket):
            for expert_rank, of_rank in enumerate(whole):
                yield owned, expert_rank, [of_shard[index] for of_shard in of_rank]

    def _by_kind(self, plan: Sequence[Owned]) -> Iterator[Owned]:
        """``plan`` with the tensors of a layer that are gathered alike next to each other."""
        for _, layer in groupby(plan, key=lambda owned: (owned.place.mtp, owned.place.layer, owned.dtype)):
            yield from sorted(layer, key=self._kind)

    def _is_expert(self, owned: Owned) -> bool:
        return self.tensors.rule(owned.place).is_expert

    def _is_by_block(self, owned: Owned) -> bool:
        # not the prediction layers: engines may run a draft model on other ranks than the experts of the model
        return bool(self.recipients.blocks) and owned.place.mtp < 0 and self._is_expert(owned)

    def _unit(self, owned: Owned) -> tuple[int, ...]:
        place = owned.place
        # Experts by blocks are gathered in whole layers: every rank then gets the same sizes from each bucket, in the
        # same order, and the ranks of an engine send buckets at the same time.
        return (place.mtp, place.layer, place.rule, -1 if self._is_by_block(owned) else place.expert)

    def _kind(self, owned: Owned) -> tuple[int, bool, bool, bool]:
        shards, _ = self._inside(owned)
        return owned.stage, self._is_expert(owned), self._is_by_block(owned), shards.size == 1

    def _inside(self, owned: Owned) -> tuple[Peers, Peers]:
        """The groups inside a stage that share a tensor: (its shards, its experts)."""
        shards = self._tensor_ranks(owned)
        return (
            _ALONE if self.tensors.rule(owned.place).split == "none" else shards,
            self.groups.expert if self._is_expert(owned) else _ALONE,
        )

    def _tensor_ranks(self, owned: Owned) -> Peers:
        return self.groups.expert_tensor if self._is_expert(owned) else self.groups.tensor

    def _gathered_bytes(self, owned: Owned) -> int:
        shards, experts = self._inside(owned)
        size = owned.num_bytes * shards.size * experts.size
        if self._is_by_block(owned):
            counts = [block[1] for block in self.recipients.blocks if block is not None]
            size = max(size // min(counts, default=1), owned.num_bytes * shards.size)
        return size

    def _value(self, owned: Owned) -> torch.Tensor:
        return readable(self.read(self.tensors.local[owned.place]))

    def _own(self, bucket: Sequence[Owned]) -> torch.Tensor:
        """This rank's shards if its stage owns the bucket, else memory for them."""
        if bucket[0].stage == self.groups.stages.rank:
            return _flatten([self._value(owned) for owned in bucket])
        device = next(iter(self.tensors.local.values())).value.device
        return torch.empty(_length(bucket), dtype=torch.uint8, device=device)

    def _across_stages(self, bucket: Sequence[Owned]) -> torch.Tensor:
        flat = self._own(bucket)
        if self.groups.stages.size > 1:
            self.groups.stages.broadcast(flat, bucket[0].stage)
        return flat

    def _to_source(self, bucket: Sequence[Owned]) -> torch.Tensor | None:
        """``[expert rank][shard]`` one after the other, on rank 0. None elsewhere."""
        inside, stages, stage = self._inside(bucket[0]), self.groups.stages, bucket[0].stage
        is_first = self.groups.is_first_expert_copy if self._is_expert(bucket[0]) else self.groups.is_first_copy
        # of a tensor that every tensor-parallel rank has whole, one copy is enough
        if not is_first or (inside[0] is _ALONE and self._tensor_ranks(bucket[0]).rank != 0):
            return None
        flat: torch.Tensor | None = None
        if stage == stages.rank:
            flat = self._own(bucket)
            for group in inside:
                if flat is not None and group.size > 1:
                    flat = group.gather(flat)
        elif stages.rank == 0 and all(group.rank == 0 for group in inside):
            device = next(iter(self.tensors.local.values())).value.device
            length = _length(bucket) * inside[0].size * inside[1].size
            flat = torch.empty(length, dtype=torch.uint8, device=device)
        if flat is None or stage == 0:
            return flat
        stages.to_first(flat, stage)
        return flat if stages.rank == 0 else None

    def _blocks(self, bucket: Sequence[Owned]) -> Iterator[Piece]:
        """The experts of this rank's block."""
        shards, experts = self._inside(bucket[0])
        flat = self._across_stages(bucket)
        if shards.size > 1:
            flat = shards.all_gather(flat)
        lengths = [_padded(owned.num_bytes) for owned in bucket]
        begins = list(accumulate(lengths, initial=0))
        num_experts = self.tensors.num_local_experts * experts.size
        rows = flat.view(shards.size, -1)
        held = [rows[:, begins[index] : begins[index + 1]] for index in range(len(bucket))]

        def chosen(holder: int, member: int) -> list[int]:
            """Indices of the tensors that expert-parallel rank ``holder`` gives to ``member``."""
            wanted = self.recipients.experts(experts.members[member], num_experts)
            return [k for k, one in enumerate(bucket) if self.tensors.expert(one.place, holder) in wanted]

        received = {(index, experts.rank): held[index] for index in chosen(experts.rank, experts.rank)}
        if experts.size > 1:
            others = [member for member in range(experts.size) if member != experts.rank]
            give = {member: chosen(experts.rank, member) for member in others}
            take = {member: chosen(member, experts.rank) for member in others}
            parts = [held[index].reshape(-1) for member in others for index in give[member]]
            sizes = [
                [shards.size * sum(lengths[k] for k in of_member.get(member, ())) for member in range(experts.size)]
                for of_member in (give, take)
            ]
            flat = experts.exchange(torch.cat(parts) if parts else flat.new_empty(0), *sizes)
            order = [(index, member) for member in others for index in take[member]]
            spans = flat.split([shards.size * lengths[index] for index, _ in order])
            received |= {key: span.view(shards.size, -1) for key, span in zip(order, spans, strict=True)}
        for index, member in sorted(received):
            owned = bucket[index]
            yield owned, member, [_unflatten(row, [owned])[0] for row in received[index, member]]


class _NoPeers(Peers):
    """A group of this rank alone."""

    def __init__(self) -> None:
        self.size, self.rank = 1, 0


_ALONE = _NoPeers()


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _length(bucket: Sequence[Owned]) -> int:
    return sum(_padded(owned.num_bytes) for owned in bucket)


def _flatten(values: Sequence[torch.Tensor]) -> torch.Tensor:
    # Bytes, because a bucket may mix dtypes.
    length = sum(_padded(value.nbytes) for value in values)
    flat = torch.zeros(length, dtype=torch.uint8, device=values[0].device)
    begin = 0
    for value in values:
        flat[begin : begin + value.nbytes] = value.contiguous().view(-1).view(torch.uint8)
        begin += _padded(value.nbytes)
    return flat


def _unflatten(flat: torch.Tensor, bucket: Sequence[Owned]) -> list[torch.Tensor]:
    tensors, begin = [], 0
    for owned in bucket:
        tensors.append(flat[begin : begin + owned.num_bytes].view(owned.dtype).view(owned.shape))
        begin += _padded(owned.num_bytes)
    return tensors
