"""Context parallelism's two pieces of maths on real ranks: attention over zigzag chunks, and making responses whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.dist.ranks import ForkServer
from tests.unit.megatron_utils.tiny_families import make_family_checkpoint
from tests.unit.megatron_utils.tiny_trainer import make_hf_model
from tests.verification import plain_attention, verify


@pytest.mark.parametrize(("size", "chunks"), [(2, [1]), (2, [1, 7, 20, 2]), (3, [2, 1, 9]), (4, [1, 12, 1])], ids=str)
def test_attention_and_its_gradients_equal_a_plain_loop_in_fp64(
    size: int, chunks: list[int], ranks: ForkServer
) -> None:
    lengths = [2 * size * chunk for chunk in chunks]
    total = sum(lengths)
    generator = torch.Generator().manual_seed(3)
    # values narrower than queries and keys, as in latent attention
    shapes = [(total, 4, 8), (total, 2, 8), (total, 2, 6)]
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    cotangent = torch.randn((total, 4 * 6), generator=generator, dtype=torch.float64)
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    expected = plain_attention(*leaves, lengths)
    (expected * cotangent).sum().backward()

    case = "tests.dist.attention_cases:attend"
    results = ranks.run(case, size, inputs=inputs, cotangent=cotangent, lengths=lengths)
    for rows, out, gradients in results:
        verify("context-parallel attention, fp64", "a loop over queries", out, expected[rows], tolerance=1e-13)
        for gradient, leaf in zip(gradients, leaves, strict=True):
            wanted = leaf.grad[rows]
            verify(
                "gradients of context-parallel attention, fp64",
                "a loop over queries",
                gradient,
                wanted,
                tolerance=1e-12,
            )


@pytest.mark.parametrize("owner", [[0, 1, 1, 0, 2], [1, 1], [2]], ids=str)
def test_every_rank_gets_the_whole_and_keeps_its_share_of_the_gradient(owner: list[int], ranks: ForkServer) -> None:
    values = torch.arange(1.0, len(owner) + 1)
    total = values.sum()
    for rank, (whole, gradient) in enumerate(
        ranks.run("tests.dist.attention_cases:gather", 3, owner=owner, values=values)
    ):
        assert torch.equal(whole, values)
        # d(sum^2) = 2 sum, on the ranks that hold tokens. Each token is counted once, not per rank.
        assert gradient.tolist() == [2 * total] * owner.count(rank)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_an_attention_of_transformers_gives_the_same_on_one_rank_and_on_two(
    tmp_path: Path, ranks: ForkServer, sequence_parallel: bool
) -> None:
    make_hf_model("qwen3", tmp_path)
    hidden_size = json.loads((tmp_path / "config.json").read_text())["hidden_size"]
    lengths = [4, 12]
    generator = torch.Generator().manual_seed(3)
    inputs = {
        name: torch.randn((sum(lengths), hidden_size), generator=generator, dtype=torch.float64)
        for name in ("hidden", "cotangent")
    }
    case = "tests.dist.attention_cases:attend_with_transformers"
    ((_, whole, whole_gradient, weight_gradient),) = ranks.run(case, 1, model=str(tmp_path), lengths=lengths, **inputs)
    first = ranks.run(
        case, 1, model=str(tmp_path), lengths=[4], **{name: tensor[:4] for name, tensor in inputs.items()}
    )
    torch.testing.assert_close(first[0][1], whole[:4])  # sequences do not see each other
    options = {"lengths": lengths, "sequence_parallel": sequence_parallel}
    for rows, out, gradient, weights in ranks.run(case, 2, model=str(tmp_path), **options, **inputs):
        torch.testing.assert_close(out, whole[rows])
        torch.testing.assert_close(gradient, whole_gradient[rows])
        torch.testing.assert_close(weights, weight_gradient)


@pytest.mark.parametrize(("tensor", "context"), [(1, 2), (1, 4), (2, 2)])
@pytest.mark.parametrize("kind", ["deepseek_v3", "moonlight"])
def test_latents_are_exchanged_instead_of_keys_and_values_with_the_result_of_one_rank(
    kind: str, tensor: int, context: int, tmp_path: Path, ranks: ForkServer
) -> None:
    make_family_checkpoint(kind, tmp_path / "hf", first_k_dense_replace=3)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    lengths = [8, 24, 16]
    case = {"hf": str(tmp_path / "hf"), "lengths": lengths}
    run = "tests.dist.attention_cases:attend_to_latents"
    ((_, whole, whole_gradient, weights, _),) = ranks.run(run, 1, layout={"context_parallel_size": 1}, **case)
    layout = {"tensor_model_parallel_size": tensor, "context_parallel_size": context}
    for rows, out, gradient, parts, sent in ranks.run(run, tensor * context, layout=layout, **case):
        torch.testing.assert_close(out, whole[rows], atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(gradient, whole_gradient[rows], atol=1e-6, rtol=1e-6)
        if tensor == 1:
            torch.testing.assert_close(parts, weights, atol=1e-6, rtol=1e-6)
        # one gather of fp64 latents and the rope part of the key, of this rank's rows alone
        width = config["kv_lora_rank"] + config["qk_rope_head_dim"]
        assert sent == [sum(lengths) // (tensor * context) * width * 8]
        heads = config["num_attention_heads"] // tensor
        expanded = heads * 2 * (config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
        assert expanded * tensor > 3 * width
