"""Protocols between the backends and the wiring. Standard library only, so that every room can import it.

Trainers and engines do not know each other. ``slime.ray`` connects them through these protocols. Tests replace either
side with a recording fake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    import torch

# (Hugging Face parameter name, full unsharded tensor)
NamedTensor: TypeAlias = "tuple[str, torch.Tensor]"

DtypeName: TypeAlias = Literal["bfloat16", "float16", "float32"]


def weights_dtype(*, fp16: bool, fp32: bool) -> DtypeName:
    """Precision of the weights in trainers and engines, and of activations: bfloat16 unless --fp16 or --fp32."""
    return "float32" if fp32 else "float16" if fp16 else "bfloat16"


# The parts of a trainer's device memory between steps. Activations are not a part: they exist only within a step.
TrainerPart: TypeAlias = Literal["weights", "gradients", "optimizer"]
TRAINER_PARTS: tuple[TrainerPart, ...] = ("weights", "gradients", "optimizer")


@dataclass(frozen=True)
class EngineInfo:
    """One engine as the trainer sees it.

    Attributes:
        url: base URL of its HTTP server.
        num_gpus: device slots (tensor-parallel ranks) that join a weight-update group.
        first_slot: its first device among all devices of the run, the trainer's first. None for an external engine.
        expert_blocks: device k of n loads only the experts of block ``k * expert_blocks // n``, of so many equal
            blocks of each layer. 1: every device loads all experts, or it is not known.
        attention_copies: equal parts of the devices that hold all of attention and of the embedding each.
        head_copies: the same for the output layer.
        num_schedulers: each has requests and a prefix cache of its own (data-parallel attention).
    """

    url: str
    num_gpus: int
    first_slot: int | None = None  # with --colocate slot s is also the slot of trainer rank s
    expert_blocks: int = 1
    attention_copies: int = 1
    head_copies: int = 1
    num_schedulers: int = 1

    def place(self, rank: int) -> Place:
        return Place(rank, self.num_gpus, self.expert_blocks, self.attention_copies, self.head_copies)


@dataclass(frozen=True)
class Recipients:
    """The trainer ranks that get exported weights.

    Attributes:
        source_only: only the rank with ``is_weight_source``. False: all ranks.
        blocks: per rank (number, count): of the experts of a layer, divided into ``count`` equal blocks, the rank gets
            block ``number`` only. None for a rank that needs no experts. Empty: every rank gets all experts.
    """

    source_only: bool = False
    blocks: tuple[tuple[int, int] | None, ...] = ()

    def experts(self, rank: int, num_experts: int) -> range:
        """The experts of a layer that trainer rank ``rank`` gets."""
        number, count = (self.blocks[rank] or (0, 0)) if self.blocks else (0, 1)
        return range(number * num_experts // count, (number + 1) * num_experts // count) if count else range(0)


EVERY_RANK = Recipients()
SOURCE = Recipients(source_only=True)


DRAFT = "draft"
"""Prefix of the tensors of a draft, on both sides. Their engine names differ from the trainer's by family."""


class Place(NamedTuple):
    """One rank of an engine: tensor-parallel rank and size, the others as in :class:`EngineInfo`."""

    rank: int
    size: int
    blocks: int
    attention_copies: int = 1
    head_copies: int = 1


class Piece(NamedTuple):
    """A part of an engine tensor.

    Attributes:
        name: of the engine tensor.
        shares: the ranks that hold each share of the part. The same for all parts of a tensor.
        order: number of the part.
        tensor: ``[shares, ...]``.
        is_equal: all parts of the tensor have the same size.
    """

    name: str
    shares: tuple[tuple[Place, ...], ...]
    order: int
    tensor: torch.Tensor
    is_equal: bool = False


class TensorHash(Protocol):
    """The checksums of all shares of one engine tensor."""

    needs_order: bool
    """Whether parts must be added one after the other, even if all have the same size."""

    def add(self, tensor: torch.Tensor, order: int | None = None) -> None:
        """Add the next part ``[shares, ...]``, or number ``order`` of parts of equal sizes."""


class EngineTensors(Protocol):
    """The rules by which a kind of engine lays out tensors, and its checksum."""

    def cuts(self, places: Sequence[Place]) -> Callable[[str, torch.Tensor], Iterable[Piece]]:
        """The function that makes of one exported tensor the parts of engine tensors that ``places`` hold."""

    def hash(self, num_shares: int) -> TensorHash:
        """The checksums of a new tensor."""

    def digests(self, hashes: Sequence[TensorHash]) -> list[list[str]]:
        """The checksums of all shares of each, as the engine reports them."""


@dataclass(frozen=True)
class TrainReport:
    """The report of one rank on the training on one rollout.

    Attributes:
        steps: metrics of every optimizer step, in order, without prefix (``loss``, ``grad_norm``, ...). Filled on the
            main rank only, empty elsewhere.
        rollout: metrics over the whole rollout batch as the trainer sees it (``log_probs``, ``advantages``, ...).
        seconds: seconds spent, by phase (``log_probs``, ``ref_log_probs``, ``train``).
    """

    steps: list[dict[str, float]] = field(default_factory=list)
    rollout: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Probe:
    """A trainer's log-probs of ``token_ids`` from the second on, at temperature 1: with its adapters, and of the base.

    Attributes:
        version: of the adapters.
    """

    version: str
    token_ids: Sequence[int]
    adapted: Sequence[float]
    base: Sequence[float]


@dataclass(frozen=True)
class AdapterProof:
    """The answers that engines must give after a sync of adapters.

    Attributes:
        fields: those by which the run's requests name the adapter.
    """

    probe: Probe
    fields: Mapping[str, str]


@dataclass(frozen=True)
class Canary:
    """A fixed prompt that trainer and engines score after a sync.

    Attributes:
        scores: the trainer's log-probs of the second half of ``token_ids``, at temperature 1.
        tolerance: largest median of the differences, in nats.
    """

    version: str
    token_ids: Sequence[int]
    scores: Sequence[float]
    tolerance: float


class WeightExporter(Protocol):
    """A trainer as weight sync uses it. Every method is called on all ranks at the same time."""

    @property
    def is_weight_source(self) -> bool:
        """True on the rank that holds the gathered weights while they are exported."""

    def export_weights(
        self, bucket_bytes: int = 512 * 1024**2, recipients: Recipients = EVERY_RANK
    ) -> Iterator[NamedTensor]:
        """All weights under their Hugging Face names, full and unpadded. Empty on ranks that are not recipients.

        With adapters those of the base, or with ``--lora-merge`` merged ones.

        Args:
            bucket_bytes: bytes that are gathered at a time, if the weights are divided among ranks.
        """
        # A collective: a rank that does not exhaust the iterator blocks all others.

    def export_adapter(
        self, bucket_bytes: int = 512 * 1024**2, recipients: Recipients = EVERY_RANK
    ) -> Iterator[NamedTensor]:
        """The adapters alone under peft's names, without ``base_model.model.``. Otherwise as :meth:`export_weights`."""

    def save_hf(self, path: str) -> None:
        """Write the model as a Hugging Face checkpoint directory, or the adapters as one of peft."""


class Trainer(WeightExporter, Protocol):
    """One rank of a training backend. Every method is called on all ranks at the same time."""

    def setup(self) -> int:
        """Build model, optimizer and scheduler, load the checkpoint. Returns the rollout id to start with."""

    @property
    def data_parallel(self) -> tuple[int, int]:
        """(rank, size) in the data-parallel group, context parallelism not counted."""

    def train(self, rollout_id: int, batch: dict[str, Any]) -> TrainReport:
        """Train on this data-parallel rank's part of a rollout (columns of ``slime.data.columns``)."""

    def reward_kl(self, rollout_id: int, batch: dict[str, Any]) -> list[torch.Tensor]:
        """The KL divergence that enters the rewards, ``[R_i]`` per sample. :meth:`train` reuses its passes."""

    def train_values(self, rollout_id: int, batch: dict[str, Any]) -> tuple[TrainReport, list[torch.Tensor]]:
        """A critic's :meth:`train`. Also returns its values before the update, fp32 ``[R_i]`` per sample on cpu."""

    def adapter_proof(self, version: str) -> AdapterProof | None:
        """The proof that engines use the adapters, which are ``version``. None if engines get weights."""

    def fixed_log_probs(self, ids: list[int]) -> list[float]:
        """Log-probs of ``ids`` from the second on, at temperature 1, under the live weights."""

    def keep_version(self, version: str) -> None:
        """Keep a copy of the live weights, for batches whose ``generated_by`` is ``version``."""

    def save(self, rollout_id: int) -> None:
        """Write a checkpoint whose iteration is ``rollout_id``.

        It is complete when this returns on all ranks, unless ``--async-save`` writes it in the background.
        """

    def finish_saves(self) -> None:
        """Wait for the checkpoint that is written in the background, if any."""

    def offload(self, parts: Sequence[TrainerPart] = TRAINER_PARTS) -> None:
        """Release the device memory of ``parts`` to the driver. Idempotent.

        Training needs all parts on the device, :meth:`save` weights and optimizer, all other methods only the weights.
        A call without its parts raises ``SlimeError``.
        """

    def onload(self, parts: Sequence[TrainerPart] = TRAINER_PARTS) -> None:
        """Restore ``parts`` bit for bit, gradients as zeros. Idempotent."""


class PendingCalls(Protocol):
    """Calls that were started on every engine of a fleet."""

    def wait(self, timeout_s: float) -> list[Any]:
        """One result per engine, in fleet order. Raises ``EngineError`` or ``DeadlineExceeded`` naming the engine."""


class EngineFleet(Protocol):
    """The engines that receive weights."""

    @property
    def engines(self) -> Sequence[EngineInfo]: ...

    def only(self, indices: Sequence[int]) -> EngineFleet:
        """A fleet of a subset of the engines."""

    def start(self, verb: str, each: Sequence[Mapping[str, Any]] | None = None, **kwargs: Any) -> PendingCalls:
        """Start ``engine.verb(**kwargs, **each[i])`` on every engine without waiting."""
