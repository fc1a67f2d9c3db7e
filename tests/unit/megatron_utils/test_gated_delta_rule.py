"""The gated delta rule in chunks against a loop over tokens, and what must not depend on the neighbors in a pack."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils.model.attention import Sequences
from slime.backends.megatron_utils.model.gated_delta_net import causal_conv, gated_delta_rule, unit_length
from tests.verification import verify

_HEADS, _KEY, _VALUE = 3, 8, 5
_LENGTHS = [5, 1, 70, 16, 0, 33]
_Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _inputs(num_tokens: int) -> _Inputs:
    generator = torch.Generator().manual_seed(3)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(num_tokens, _HEADS, *shape, generator=generator)

    log_decay = -torch.nn.functional.softplus(randn())
    return unit_length(randn(_KEY)), unit_length(randn(_KEY)), randn(_VALUE), log_decay, randn().sigmoid()


def _sequences(lengths: list[int], **settings: Any) -> Sequences:
    return Sequences([0, *accumulate(lengths)], torch.device("cpu"), **settings)


def _token_by_token(inputs: _Inputs, lengths: list[int]) -> torch.Tensor:
    """Equation 10 of arXiv 2412.06464 unchanged, state ``[heads, dk, dv]``."""
    query, key, value, log_decay, beta = inputs
    outputs, t = [], 0
    for length in lengths:
        state = value.new_zeros(_HEADS, _KEY, _VALUE)
        for _ in range(length):
            state = state * log_decay[t].exp()[:, None, None]
            stored = torch.einsum("hk,hkv->hv", key[t], state)
            write = beta[t][:, None] * (value[t] - stored)
            state = state + key[t][:, :, None] * write[:, None]
            outputs.append(torch.einsum("hk,hkv->hv", query[t], state) / _KEY**0.5)
            t += 1
    return torch.stack(outputs)


@pytest.mark.parametrize("chunk_size", [1, 7, 64])
def test_outputs_and_gradients_equal_a_loop_over_tokens(chunk_size: int) -> None:
    inputs = tuple(x.requires_grad_() for x in _inputs(sum(_LENGTHS)))
    weight = torch.randn(sum(_LENGTHS), _HEADS, _VALUE, generator=torch.Generator().manual_seed(1))
    expected = _token_by_token(inputs, _LENGTHS)  # type: ignore[arg-type]
    gradients = torch.autograd.grad((expected * weight).sum(), inputs)
    out = gated_delta_rule(*inputs, _sequences(_LENGTHS, chunk_size=chunk_size))  # type: ignore[arg-type]
    verify("gated delta rule in chunks", "a loop over tokens", out, expected, tolerance=1e-5)
    for name, ours, reference in zip(
        ("query", "key", "value", "log_decay", "beta"),
        torch.autograd.grad((out * weight).sum(), inputs),
        gradients,
        strict=True,
    ):
        verify(f"its gradient by {name}", "a loop over tokens", ours, reference, tolerance=1e-4)


def test_a_sequence_alone_gives_the_same_outputs_as_between_neighbors() -> None:
    inputs = _inputs(sum(_LENGTHS))
    packed = gated_delta_rule(*inputs, _sequences(_LENGTHS))  # type: ignore[arg-type]
    begin = sum(_LENGTHS[:2])
    alone = gated_delta_rule(*(x[begin : begin + 70] for x in inputs), _sequences([70]))  # type: ignore[arg-type]
    verify("outputs of a packed sequence", "the sequence alone", packed[begin : begin + 70], alone, tolerance=1e-6)


def test_strong_decay_neither_overflows_nor_poisons_the_gradient() -> None:
    query, key, value, log_decay, beta = _inputs(100)
    log_decay = (log_decay * 200).requires_grad_()
    out = gated_delta_rule(query, key, value, log_decay, beta, _sequences([100]))
    out.sum().backward()
    assert out.isfinite().all()
    assert log_decay.grad is not None
    assert log_decay.grad.isfinite().all()


def test_the_convolution_sees_only_the_last_tokens_of_its_own_sequence() -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(sum(_LENGTHS), 6, generator=generator)
    weight = torch.randn(6, 1, 4, generator=generator)
    expected, begin = torch.zeros_like(x), 0
    for length in _LENGTHS:
        for t in range(length):
            for back in range(min(4, t + 1)):
                expected[begin + t] += weight[:, 0, 3 - back] * x[begin + t - back]
        begin += length
    out = causal_conv(x, weight, _sequences(_LENGTHS))
    verify("causal convolution", "a loop over tokens", out, expected, tolerance=1e-5)
