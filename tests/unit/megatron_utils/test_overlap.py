"""--overlap-grad-reduce and --overlap-param-gather: when communication starts, and what it waits for. One process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils import step
from slime.backends.megatron_utils.actor import MegatronTrainer
from slime.utils.errors import SlimeError
from tests.unit.megatron_utils.tiny_trainer import make_args, make_batch, make_hf_model, split_batch, weights_of

pytestmark = pytest.mark.usefixtures("trainer_rank")

OVERLAP: dict[str, Any] = {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 4000}


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("overlap") / "hf"
    make_hf_model("qwen3", path)
    return path


def _trainer(hf: Path, **overrides: Any) -> MegatronTrainer:
    trainer = MegatronTrainer(make_args(hf, lr=1e-3, **overrides), rank=0, world_size=1, with_ref=False)
    assert trainer.setup() == 0
    return trainer


def test_buckets_are_reduced_in_the_backward_pass_and_weights_gathered_in_the_forward_pass(
    hf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = _trainer(hf, fp32=False, global_batch_size=4, **OVERLAP)
    (chunk,) = trainer._ready.chunks
    groups = chunk.bucket_groups
    assert len(groups) > 3
    started, gathered = [], []
    finalize, update = step.finalize_model_grads, step._update

    def counted(*args: Any, **others: Any) -> None:
        started.append(sum(group.grad_reduce_handle is not None for group in groups))
        gathered.append(sum(group.param_gather_dispatched for group in groups))
        finalize(*args, **others)

    def updated(*args: Any) -> Any:
        result = update(*args)
        gathered.append(sum(group.param_gather_dispatched for group in groups))
        return result

    monkeypatch.setattr(step, "finalize_model_grads", counted)
    monkeypatch.setattr(step, "_update", updated)
    trainer.train(0, split_batch(make_batch(), 0, 1, num_steps=2))
    assert started == [0, len(groups)], "the first step shows Megatron which gradients a bucket waits for"
    assert gathered == [len(groups), 0, len(groups), 0], "not by the update, but by the forward pass after it"
    assert all(group.param_gather_dispatched for group in groups), "at the end of the rollout"


def test_training_is_equal_with_and_without_overlap(hf: Path) -> None:
    results = []
    for settings in ({}, OVERLAP):
        trainer = _trainer(hf, fp32=False, global_batch_size=4, **settings)
        steps = [trainer.train(seed, split_batch(make_batch(seed=seed), 0, 1, num_steps=2)).steps for seed in range(2)]
        results.append((steps, weights_of(trainer)))
    (steps, weights), (overlapped, others) = results
    assert steps == overlapped
    for name, value in weights.items():
        assert torch.equal(others[name], value), name


def test_a_nan_gradient_is_found_although_buckets_are_reduced_before_the_end(hf: Path) -> None:
    trainer = _trainer(hf, **OVERLAP)
    trainer.train(0, make_batch())
    before = weights_of(trainer)
    bad = make_batch()
    bad["rewards"][3] = float("nan")
    with pytest.raises(SlimeError, match=r"gradients are NaN .*ranks \[0\] .*nothing was applied"):
        trainer.train(1, bad)
    assert all(torch.equal(value, before[name]) for name, value in trainer.export_weights())


def test_a_checkpoint_does_not_depend_on_the_buckets(hf: Path, tmp_path: Path) -> None:
    whole = _trainer(hf, fp32=False)
    first = _trainer(hf, fp32=False, save=str(tmp_path), **OVERLAP)
    for trainer in (whole, first):
        trainer.train(0, make_batch())
    first.save(0)
    second = MegatronTrainer(
        make_args(hf, lr=1e-3, fp32=False, load=str(tmp_path)), rank=0, world_size=1, with_ref=False
    )
    assert second.setup() == 1
    for trainer in (whole, second):
        trainer.train(1, make_batch(seed=1))
    expected = weights_of(whole)
    assert all(torch.equal(value, expected[name]) for name, value in second.export_weights())
