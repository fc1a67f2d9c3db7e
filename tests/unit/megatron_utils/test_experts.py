"""Grouped experts and sorted tokens against Megatron's experts, one after another, and its dispatcher."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.experts import calls_of, grouped_layer, megatrons_layer

pytestmark = pytest.mark.usefixtures("megatron_groups")

_HIDDEN, _WIDTH = 32, 16


def layers(num_experts: int, topk: int, *, width: int = _WIDTH, **settings: Any) -> tuple[Any, Any]:
    """(Megatron's, ours) with the same random weights."""
    ours = grouped_layer(num_experts, topk, hidden=_HIDDEN, width=width, **settings)
    return megatrons_layer(ours), ours


def gradients(layer: Any, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """The output, and gradients of its product with a fixed tensor. Those of experts are stacked."""
    layer.zero_grad()
    tokens = tokens.detach().clone().requires_grad_()
    out, _ = layer(tokens)
    target = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out.dtype)
    (out * target).sum().backward()
    assert tokens.grad is not None
    found = {"output": out.detach(), "tokens": tokens.grad, "router": layer.router.weight.grad.clone()}
    for name in ("linear_fc1", "linear_fc2"):
        experts = getattr(layer.experts, "local_experts", None)
        parts = [layer.experts] if experts is None else experts
        weights = [getattr(part, name).weight for part in parts]
        found[name] = torch.cat([torch.zeros_like(w) if w.grad is None else w.grad.clone() for w in weights])
    return found


def assert_same(stock: Any, ours: Any, tokens: torch.Tensor, tolerance: float = 1e-6) -> None:
    expected, found = gradients(stock, tokens), gradients(ours, tokens)
    for name, value in expected.items():
        scale = max(1.0, float(value.abs().max()))
        torch.testing.assert_close(
            found[name], value, rtol=0, atol=tolerance * scale, msg=lambda m, n=name: f"{n}: {m}"
        )


def make_tokens(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, 1, _HIDDEN, generator=torch.Generator().manual_seed(2)).to(dtype)


@pytest.mark.parametrize(
    ("num_experts", "topk", "settings"),
    [
        (128, 8, {}),
        (8, 2, {"moe_router_dtype": None}),
        (8, 1, {"moe_router_pre_softmax": True}),
        (8, 3, {"moe_router_score_function": "sigmoid", "moe_router_topk_scaling_factor": 2.5}),
        (
            16,
            4,
            {
                "moe_router_score_function": "sigmoid",
                "moe_router_enable_expert_bias": True,
                "moe_router_num_groups": 4,
                "moe_router_group_topk": 2,
            },
        ),
        (1, 1, {"moe_router_pre_softmax": True}),
        (4, 2, {"width": 6}),  # rows of 24 bytes, which grouped_mm refuses
        (8, 2, {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}),
        (8, 2, {"recompute_granularity": "selective", "recompute_modules": ["moe"]}),
    ],
)
def test_a_layer_equals_sequential_experts(num_experts: int, topk: int, settings: dict[str, Any]) -> None:
    assert_same(*layers(num_experts, topk, **settings), make_tokens(70))


def test_the_fused_activation_equals_single_operators() -> None:
    (stock, _), (_, ours) = layers(8, 2), layers(8, 2, bias_activation_fusion=True)
    assert_same(stock, ours, make_tokens(70))


@pytest.mark.parametrize("count", [1, 3])
def test_experts_without_tokens_have_zero_gradients(count: int) -> None:
    stock, ours = layers(128, 2)
    assert_same(stock, ours, make_tokens(count))
    idle = ours.experts.linear_fc1.weight.grad.view(128, -1).abs().sum(1) == 0
    assert int(idle.sum()) >= 128 - 2 * count


def test_no_tokens_at_all() -> None:
    _, ours = layers(4, 2)
    rows, counts, probs = torch.zeros(0, _HIDDEN, requires_grad=True), torch.zeros(4, dtype=torch.int64), torch.zeros(0)
    out, _ = ours.experts(rows, counts, probs)
    out.sum().backward()
    assert out.shape == (0, _HIDDEN)
    assert ours.experts.linear_fc1.weight.grad.abs().max() == 0


def test_16_bit_experts_differ_by_rounding() -> None:
    stock, ours = (layer.bfloat16() for layer in layers(16, 4))
    exact = layers(16, 4, moe_router_dtype="fp64")[0].bfloat16().double()
    tokens = make_tokens(60, torch.bfloat16)
    truth, theirs, found = gradients(exact, tokens.double()), gradients(stock, tokens), gradients(ours, tokens)
    for name, value in truth.items():
        # Sums over the experts of a token are in fp32 here and in bf16 there.
        assert (found[name] - value).abs().mean() <= 1.05 * (theirs[name] - value).abs().mean(), name


@pytest.mark.parametrize("last_is_chosen", [False, True])
def test_a_choice_that_names_an_expert_twice_counts_once(last_is_chosen: bool) -> None:
    """A replayed choice may. The router then marks fewer experts than ``topk``."""
    stock, ours = layers(8, 2)
    chosen = torch.tensor([[3, 3], [7, 7], [0, 7 if last_is_chosen else 5], [1, 2]])
    routing_map = torch.zeros(4, 8, dtype=torch.bool).scatter(1, chosen, True)
    probs = routing_map * torch.rand(4, 8, generator=torch.Generator().manual_seed(4))
    for layer in (stock, ours):
        layer.router.forward = lambda *_: (probs, routing_map)
    tokens = make_tokens(4)
    torch.testing.assert_close(ours(tokens)[0], stock(tokens)[0], rtol=0, atol=1e-6)


def test_128_experts_need_less_than_a_twentieth_of_the_operator_calls() -> None:
    stock, ours = layers(128, 8)
    tokens = make_tokens(256).requires_grad_()
    (forward, backward), (our_forward, our_backward) = calls_of(stock, tokens), calls_of(ours, tokens)
    assert our_forward < forward / 20
    assert our_backward < backward / 20


def test_a_layer_on_one_rank_never_waits_for_the_device() -> None:
    """A tensor on "meta" has no values: to read one, or to make a result whose size depends on one, is an error."""
    settings = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    stock, ours = (layer.to("meta", torch.bfloat16) for layer in layers(16, 4, **settings))
    tokens = torch.empty(64, 1, _HIDDEN, device="meta", dtype=torch.bfloat16, requires_grad=True)
    out, _ = ours(tokens)
    out.sum().backward()
    assert ours.experts.linear_fc1.weight.grad.shape == ours.experts.linear_fc1.weight.shape
    with pytest.raises(NotImplementedError, match="masked_select"):
        stock(tokens)


def test_single_experts_are_views_under_the_names_of_sequential_experts() -> None:
    from slime.backends.megatron_utils.model.experts import experts_of

    stock, ours = layers(4, 2)
    found = dict(pair for name, weight in ours.named_parameters("mlp") for pair in experts_of(name, weight))
    expected = dict(stock.named_parameters("mlp"))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    found["mlp.experts.local_experts.2.linear_fc2.weight"].fill_(7.0)
    assert (ours.experts.linear_fc2.weight.view(4, _HIDDEN, _WIDTH)[2] == 7).all()


def test_the_marks_of_the_optimizer_are_those_of_sequential_experts() -> None:
    stock, ours = layers(4, 2)
    names = ("tensor_model_parallel", "partition_dim", "partition_stride", "allreduce")
    for name in ("linear_fc1", "linear_fc2"):
        mine = vars(getattr(ours.experts, name).weight)
        theirs = vars(getattr(stock.experts.local_experts[0], name).weight)
        # Megatron marks divided weights only while it fills them.
        assert {key: mine[key] for key in names if key in theirs} == {
            key: theirs[key] for key in names if key in theirs
        }
        assert mine["partition_dim"] == (0 if name == "linear_fc1" else 1)


def test_the_checkpoint_has_the_tensors_of_sequential_experts() -> None:
    from megatron.core import parallel_state as mpu
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    metadata = {"dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True)}
    found = []
    for layer in layers(4, 2):
        state = layer.sharded_state_dict("decoder.layers.0.mlp.", ((0, 0, 2),), metadata)
        apply_factories(state)
        tensors = [one for one in _leaves(state) if isinstance(one, ShardedTensor)]
        found.append({(one.key, one.global_offset): one for one in tensors})
    stock, ours = found
    assert stock.keys() == ours.keys()
    for place, tensor in stock.items():
        assert torch.equal(ours[place].data, tensor.data), place
        assert ours[place].without_data() == tensor.without_data()


def _leaves(state: Any) -> list[Any]:
    if isinstance(state, dict | list):
        return [leaf for part in (state.values() if isinstance(state, dict) else state) for leaf in _leaves(part)]
    return [state]
