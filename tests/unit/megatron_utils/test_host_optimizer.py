"""Optimizer states on the host change no number, in training and across a checkpoint. One process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from slime.backends.megatron_utils.actor import MegatronTrainer
from tests.unit.megatron_utils.tiny_trainer import make_args, make_batch, make_hf_model

OFFLOADED = {"optimizer_cpu_offload": True}


pytestmark = pytest.mark.usefixtures("trainer_rank")


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("host") / "hf"
    make_hf_model("qwen3", path)
    return path


def _train(hf: Path, rollouts: range, **overrides: Any) -> tuple[MegatronTrainer, dict[str, torch.Tensor]]:
    """Train, and save after the last rollout if a directory is set."""
    settings = {"lr": 1e-3, "weight_decay": 0.1, "lr_decay_style": "cosine", "lr_warmup_iters": 1} | overrides
    trainer = MegatronTrainer(make_args(hf, **settings), rank=0, world_size=1, with_ref=False)
    assert trainer.setup() == rollouts.start
    for rollout_id in rollouts:
        trainer.train(rollout_id, make_batch(seed=rollout_id))
    if overrides.get("save"):
        trainer.save(rollouts[-1])
    return trainer, {name: value.clone() for name, value in trainer.export_weights()}


@pytest.mark.parametrize("fraction", [1.0, 0.3])
@pytest.mark.parametrize(
    ("precision", "tolerance"),
    [
        ({"fp32": True}, 1e-6),
        ({"fp32": False}, 0.0),
        ({"fp32": False, "fp16": True, "accumulate_allreduce_grads_in_fp32": True}, 0.0),
    ],
    ids=["fp32", "bf16", "fp16"],
)
def test_states_on_the_host_train_the_same(
    hf: Path, precision: dict[str, Any], tolerance: float, fraction: float
) -> None:
    _, plain = _train(hf, range(3), **precision)
    _, ours = _train(hf, range(3), **precision, **OFFLOADED, optimizer_offload_fraction=fraction)
    for name, value in plain.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize(("first", "second"), [(OFFLOADED, {}), ({}, OFFLOADED), (OFFLOADED, OFFLOADED)])
def test_a_checkpoint_does_not_tell_where_the_states_were(
    hf: Path, first: dict[str, Any], second: dict[str, Any], tmp_path: Path
) -> None:
    _, whole = _train(hf, range(3), fp32=False)
    _train(hf, range(2), fp32=False, save=str(tmp_path), **first)
    _, resumed = _train(hf, range(2, 3), fp32=False, load=str(tmp_path), **second)
    for name, value in whole.items():
        assert torch.equal(resumed[name], value), name


def test_forgotten_moments_leave_the_main_weights_alone(hf: Path) -> None:
    from slime.backends.megatron_utils.optimizer import reset_moments

    trainer, _ = _train(hf, range(1), fp32=False, **OFFLOADED)
    (part,) = trainer._ready.optimizer.chained_optimizers
    before = [state["master_param"].clone() for state in part.optimizer.state.values()]
    reset_moments(trainer._ready.optimizer)
    for state, main in zip(part.optimizer.state.values(), before, strict=True):
        assert torch.equal(state["master_param"], main)
        assert not state["exp_avg"].any()
        assert not state["exp_avg_sq"].any()
        assert state["step"] == 0


def test_the_share_on_the_host_is_the_one_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from slime.backends.megatron_utils import host_adam

    monkeypatch.setattr(host_adam, "_HOST", torch.device("meta"))  # another device than that of the weights
    shards = [torch.zeros(10) for _ in range(4)]
    for fraction, num_on_device in ((0.0, 12), (0.5, 6), (0.6, 3), (1.0, 0)):
        optimizer = host_adam.HostAdam([{"params": shards}], host_adam.HostUpdate(fraction))
        assert len(list(optimizer.device_tensors())) == num_on_device


class _Copies(TorchDispatchMode):
    """Records every copy (destination, source) and the threads of every update."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.events: list[str] = []
        self.threads: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        match func:
            case torch.ops.aten.copy_.default:
                self.copies.append((args[0], args[1]))
                self.events.append("copy")
            case torch.ops.aten._fused_adamw_.default:
                self.threads.add(torch.get_num_threads())
                self.events.append("update")
        return func(*args, **(kwargs or {}))


def _stepped(**how: Any) -> tuple[list[torch.Tensor], Any, _Copies]:
    """Weights in bf16 after two steps, their optimizer, and the copies of the second step."""
    from slime.backends.megatron_utils.host_adam import HostAdam, HostUpdate

    generator = torch.Generator().manual_seed(0)
    shards = [torch.randn(size, generator=generator).bfloat16() for size in (70, 40, 33)]
    group = {"params": shards, "lr": 0.01, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.1}
    optimizer = HostAdam([group], HostUpdate(**how))
    for _ in range(2):
        for shard in shards:
            vars(shard)["decoupled_grad"] = torch.randn(shard.shape, generator=generator)
        with _Copies() as recorded:
            optimizer.step()
    return shards, optimizer, recorded


@pytest.mark.parametrize("overlaps", [False, True])
def test_staged_pieces_train_the_same_as_whole_shards(overlaps: bool) -> None:
    whole, before, _ = _stepped()
    staged, after, _ = _stepped(is_staged=True, overlaps=overlaps, piece=32)
    for mine, theirs in zip(staged, whole, strict=True):
        assert torch.equal(mine, theirs)
        for name, value in before.state[theirs].items():
            assert torch.equal(after.state[mine][name], value), name


@pytest.mark.parametrize("overlaps", [False, True])
def test_copies_use_staging_buffers_and_only_the_device_casts(overlaps: bool) -> None:
    shards, optimizer, recorded = _stepped(is_staged=True, overlaps=overlaps, piece=32)
    num_pieces = 3 + 2 + 2  # of 70, 40 and 33 numbers
    assert [len(buffer) for buffer in optimizer._buffers] == [32] * (1 + overlaps)
    buffers = {buffer.data_ptr() for buffer in optimizer._buffers}
    masters = {optimizer.state[shard]["master_param"].untyped_storage().data_ptr() for shard in shards}
    fetched = [source for target, source in recorded.copies if target.data_ptr() in buffers]
    sent = [target for target, source in recorded.copies if source.untyped_storage().data_ptr() in masters]
    cast = [source for target, source in recorded.copies if target.dtype != source.dtype]
    assert len(fetched) == len(sent) == len(cast) == num_pieces
    assert len(recorded.copies) == 3 * num_pieces, "no other memory is copied"
    assert {source.dtype for source in fetched} == {target.dtype for target in sent} == {torch.float32}
    assert {source.data_ptr() for source in cast} == {target.data_ptr() for target in sent}, (
        "fp32 arrives, then the cast"
    )


def test_with_overlap_the_next_gradient_is_requested_before_an_update() -> None:
    fetch, update, send = ["copy"], ["update"], ["copy", "copy"]
    assert _stepped(is_staged=True, piece=100)[2].events == 3 * (fetch + update + send)
    expected = fetch + 2 * (fetch + update + send) + update + send
    assert _stepped(is_staged=True, piece=100, overlaps=True)[2].events == expected


def test_updates_use_the_threads_of_the_rank_and_give_them_back() -> None:
    torch.set_num_threads(1)
    assert _stepped(num_threads=3)[2].threads == {3}
    assert torch.get_num_threads() == 1
    assert _stepped()[2].threads == {1}


@pytest.mark.parametrize(
    ("num_near", "num_far", "num_cpus", "quota", "expected"),
    [
        (8, 0, 96, 96, 12),  # one NUMA node
        (4, 4, 96, 192, 24),  # two NUMA nodes: four ranks share the CPUs of one
        (4, 4, 96, 64, 8),  # a container with 64 CPUs
        (8, 0, 4, 4, 1),
        (1, 0, 16, 16, 16),
    ],
)
def test_ranks_of_a_node_share_its_cpus(num_near: int, num_far: int, num_cpus: int, quota: int, expected: int) -> None:
    from slime.backends.megatron_utils.host_adam import Cores, threads_of

    near = Cores("a", tuple(range(num_cpus)), quota)
    far = Cores("a", tuple(range(num_cpus, 2 * num_cpus)), quota)
    other_node = Cores("b", near.cpus, quota)
    assert threads_of(near, num_near * [near] + num_far * [far] + 8 * [other_node]) == expected
