"""No layer waits for the device: neither for a number on the host, nor for a shape that depends on values.

On a CPU nothing waits, so a mode raises an error at the operations that would wait on a GPU.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.megatron_utils.tiny_families import make_family_checkpoint
from tests.unit.megatron_utils.tiny_trainer import VOCAB, make_args, make_batch, make_hf_model

pytestmark = pytest.mark.usefixtures("megatron_groups")

_SHAPES = ("nonzero", "masked_select", "unique_consecutive")  # depend on values
_NUMBERS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")
_METHODS = frozenset((*_NUMBERS, *_SHAPES, "unique"))
_OPERATORS = frozenset((*_SHAPES, "_unique2", "unique_dim", "bincount", "_local_scalar_dense", "equal"))
_LENGTHS = (17, 5, 30)


class _Calls(TorchFunctionMode):
    """On a CPU, ``tolist`` and some others reach no operator."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        assert name not in _METHODS, f"{name} waits for the device"
        assert name != "to" or "cpu" not in map(str, args[1:]), "a copy to the host waits for the device"
        return function(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = operator.overloadpacket.__name__
        assert name not in _OPERATORS, f"{name} waits for the device"
        if name.startswith("index") and len(args) > 1 and isinstance(args[1], list | tuple):
            masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
            assert not masks, "an index of a mask has as many rows as the mask has ones: the host waits for the number"
        if operator is torch.ops.aten.repeat_interleave.Tensor:
            assert kwargs.get("output_size") is not None, "repeat_interleave waits for the sum of its counts"
        return operator(*args, **kwargs)


def _no_waits() -> ExitStack:
    stack = ExitStack()
    stack.enter_context(_Calls())
    stack.enter_context(_Operators())
    return stack


def _watch_layers(model: Any) -> list[int]:
    """Refuse waits in every decoder layer, also while it is recomputed. Returns the layers that ran."""
    open_stacks: list[ExitStack] = []
    ran: list[int] = []

    def begin(layer: Any, *_: Any) -> None:
        ran.append(layer.layer_number)
        open_stacks.append(_no_waits())

    def end(*_: Any) -> None:
        open_stacks.pop().close()

    for layer in model.decoder.layers:
        layer.register_forward_pre_hook(begin)
        layer.register_forward_hook(end, always_call=True)
    return ran


_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}


_DENSE = {"first_k_dense_replace": 3}
_BALANCED = {"moe_router_load_balancing_type": ["aux_loss"], "moe_aux_loss_coeff": [0.1]}


@pytest.mark.parametrize(
    ("kind", "changes", "recompute"),
    [
        *(("qwen3", {}, recompute) for recompute in ({}, _RECOMPUTE)),
        ("llama", {}, {}),
        ("glm4", {}, _RECOMPUTE),  # interleaved rope on a part of the columns
        # latent attention with YaRN
        *(("deepseek_v3", _DENSE, recompute) for recompute in ({}, _RECOMPUTE, _SELECTIVE)),
        ("moonlight", _DENSE, {}),
        # experts whose products need no padding
        *(("qwen3_moe", {}, recompute) for recompute in ({}, _RECOMPUTE)),
        ("deepseek_v3", {}, _RECOMPUTE),
        ("minimax_m2", {}, {}),  # norms over all heads
        ("glm4_moe", _DENSE, {}),
        # sparse attention: the longest sequence has more keys than the indexer chooses
        *((kind, _DENSE, recompute) for kind in ("deepseek_v32", "glm_moe_dsa") for recompute in ({}, _RECOMPUTE)),
        # gated delta nets
        *(("qwen3_next", {}, recompute) for recompute in ({}, _RECOMPUTE)),
        ("qwen3_5", {}, {}),
        ("qwen3_5_moe", {}, _RECOMPUTE),
    ],
)
def test_no_layer_waits_for_the_device(
    kind: str, changes: Any, recompute: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    from slime.backends.megatron_utils.checkpoint.hf_weights import load_weights
    from tests.unit.megatron_utils.family_models import build_family_model, shape_of

    # The backward pass makes a scale of another shape than a trainer's, which trainers in later tests would keep.
    monkeypatch.setattr(MoEAuxLossAutoScaler, "main_loss_backward_scale", None)
    make_family_checkpoint(kind, tmp_path / "hf", **changes)
    model = build_family_model(tmp_path / "hf", **_BALANCED, **recompute)
    load_weights(model, shape_of(tmp_path / "hf"), str(tmp_path / "hf"), "--hf-checkpoint")
    ran = _watch_layers(model.train())
    loss = _loss(model)
    with _no_waits():
        loss.backward()
    assert all(parameter.grad is not None for parameter in model.decoder.parameters() if parameter.requires_grad)
    assert ran == [1, 2, 3] + ([3, 2, 1] if recompute is _RECOMPUTE else [])


def _loss(model: Any) -> torch.Tensor:
    from slime.backends.megatron_utils.model.attention import packed_segments

    borders = torch.tensor([0, *_LENGTHS]).cumsum(0).int()
    positions = torch.cat([torch.arange(length) for length in _LENGTHS])
    tokens = torch.randint(0, VOCAB, (1, sum(_LENGTHS)), generator=torch.Generator().manual_seed(3))
    out = model(tokens, positions[None], None, packed_seq_params=packed_segments(borders, max(_LENGTHS)))
    loss: torch.Tensor = out.float().square().mean()
    return loss


def test_no_layer_waits_while_choices_of_experts_are_recorded_and_replayed(tmp_path: Path) -> None:
    from slime.backends.megatron_utils.checkpoint.hf_weights import load_weights
    from slime.backends.megatron_utils.model.routing_replay import RoutingReplay
    from tests.unit.megatron_utils.family_models import build_family_model, shape_of

    make_family_checkpoint("qwen3_moe", tmp_path / "hf")
    model = build_family_model(tmp_path / "hf", **_RECOMPUTE)
    load_weights(model, shape_of(tmp_path / "hf"), str(tmp_path / "hf"), "--hf-checkpoint")
    replay, ran = RoutingReplay(model), _watch_layers(model.train())
    with torch.no_grad(), replay.recording():
        _loss(model)
    with replay.replaying():
        loss = _loss(model)
        with _no_waits():
            loss.backward()
    assert ran == [1, 2, 3] * 2 + [3, 2, 1]


def test_the_loss_does_not_wait_so_that_the_backward_pass_follows_the_forward_pass_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slime.backends.megatron_utils import step
    from slime.backends.megatron_utils.actor import MegatronTrainer
    from slime.backends.training import data

    def without_waits(function: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            with _no_waits():
                return function(*args, **kwargs)

        return run

    calls = 0
    monkeypatch.setattr(data, "copy_to", lambda tensor, device: tensor)  # pinned memory is not waited for
    monkeypatch.setattr(step, "micro_batch_loss", without_waits(step.micro_batch_loss))
    monkeypatch.setattr(step.StepRecord, "add", without_waits(step.StepRecord.add))
    make_hf_model("qwen3", tmp_path / "hf")
    flags = {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coef": 0.1, "use_tis": True, "use_opsm": True}
    trainer = MegatronTrainer(make_args(tmp_path / "hf", **flags), rank=0, world_size=1, with_ref=True)
    trainer.setup()
    batch = make_batch()
    result = trainer.train(0, batch)
    assert len(result.steps) == 1
    assert calls == 2 * len(batch["micro_batch_indices"])


def test_the_mode_finds_what_waits() -> None:
    x, ids = torch.arange(6.0), torch.tensor([0, 2])
    with _no_waits():
        assert x[ids].shape == (2,)
        for wait in (
            lambda: x.sum().item(),
            x.tolist,
            x.cpu,
            lambda: x.to("cpu"),
            lambda: bool(x[0] > 0),
            lambda: int(x[0]),
            lambda: x[x > 2],
            lambda: torch.nonzero(x),
            lambda: torch.masked_select(x, x > 2),
            lambda: torch.where(x > 2),
            lambda: x.repeat_interleave(ids.repeat(3)),
            lambda: x.split(ids.tolist()),
        ):
            with pytest.raises(AssertionError, match=r"waits?|host waits"):
                wait()
