"""--deterministic-mode: a step has no operator that torch refuses on a GPU. The operators are those of a CPU run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from slime.backends.megatron_utils.actor import MegatronTrainer
from tests.unit.megatron_utils.tiny_families import make_family_checkpoint
from tests.unit.megatron_utils.tiny_trainer import make_args, make_batch

pytestmark = pytest.mark.usefixtures("trainer_rank")

# Names in torch's documentation -> the operators that raise, as regular expressions of their names.
_REFUSED = {
    "nn.AvgPool3d": "avg_pool3d_backward",
    "nn.AdaptiveAvgPool2d": "_adaptive_avg_pool2d_backward",
    "nn.AdaptiveAvgPool3d": "_adaptive_avg_pool3d_backward",
    "nn.AdaptiveMaxPool2d": "adaptive_max_pool2d_backward",
    "nn.FractionalMaxPool2d": "fractional_max_pool2d_backward",
    "nn.FractionalMaxPool3d": "fractional_max_pool3d_backward",
    "nn.MaxUnpool1d": "max_unpool2d",
    "nn.MaxUnpool2d": "max_unpool2d",
    "nn.MaxUnpool3d": "max_unpool3d",
    "nn.functional.interpolate": "upsample_(linear|bilinear|bicubic|trilinear).*_backward",
    "nn.ReflectionPad1d": "reflection_pad1d_backward",
    "nn.ReflectionPad2d": "reflection_pad2d_backward",
    "nn.ReflectionPad3d": "reflection_pad3d_backward",
    "nn.NLLLoss": "nll_loss2d_forward",
    "nn.CTCLoss": "_ctc_loss_backward",
    "nn.EmbeddingBag": "_embedding_bag.*_backward",  # for mode "max" only
    "Tensor.put_": "put_?",
    "histc": "histc",
    "bincount": "bincount",
    "median": "median",
    "nn.functional.grid_sample": "grid_sampler_2d_backward|grid_sampler_3d_backward",
    "cumsum": "cumsum_?",
    "Tensor.scatter_reduce": "scatter_reduce_?",
    "Tensor.resize_": "quantized_resize_",
}


def _is_refused(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    base = name.removeprefix("aten::").split(".")[0]
    if not any(re.fullmatch(pattern, base) for pattern in _REFUSED.values()):
        return False
    match base:
        case "cumsum" | "cumsum_":  # of whole numbers it is exact in any order
            return bool(args[0].is_floating_point() and not kwargs.get("dtype"))
        case "bincount":
            return len(args) > 1 and args[1] is not None
        case "scatter_reduce" | "scatter_reduce_":
            return args[4] == "prod"
        case _:
            return True


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.refused: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func.name())
        if _is_refused(func.name(), args, kwargs or {}):
            self.refused.add(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "deepseek_v3", "qwen3_next"])
def test_a_step_has_no_operator_without_a_deterministic_kernel(kind: str, tmp_path: Path) -> None:
    make_family_checkpoint(kind, tmp_path)
    args = make_args(tmp_path, use_kl_loss=True, kl_loss_coef=0.1, entropy_coef=0.01)
    trainer = MegatronTrainer(args, rank=0, world_size=1, with_ref=True)
    trainer.setup()
    with _Operators() as operators:
        trainer.train(0, make_batch())
    assert {"aten::mm", "aten::mul.Tensor"} <= operators.seen, "forward and backward pass are seen"
    assert operators.refused == set()


def test_every_operator_that_torch_documents_is_in_the_list() -> None:
    text = torch.use_deterministic_algorithms.__doc__ or ""
    _, refused = text.split("will throw a\n    :class:`RuntimeError` when ``mode=True``", 1)
    documented = set(re.findall(r"\* :(?:class|func):`torch\.([\w.]+)`", refused.split("In addition, several")[0]))
    assert documented == set(_REFUSED)


def test_a_floating_point_cumsum_is_found() -> None:
    with _Operators() as operators:
        torch.ones(3, dtype=torch.int64).cumsum(0)
        assert operators.refused == set()
        torch.ones(3).cumsum(0)
    assert operators.refused == {"aten::cumsum"}
