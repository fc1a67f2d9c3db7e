"""Routing replay: the recorded experts are chosen again, with the scores of the current weights."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.megatron_utils.tiny_families import make_family_checkpoint
from tests.unit.megatron_utils.tiny_trainer import VOCAB

_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


pytestmark = pytest.mark.usefixtures("megatron_groups")


def _load(kind: str, path: Path, **overrides: Any) -> Any:
    from slime.backends.megatron_utils.checkpoint.hf_weights import load_weights
    from tests.unit.megatron_utils.family_models import build_family_model, shape_of

    if not path.exists():
        make_family_checkpoint(kind, path)
    model = build_family_model(path, **overrides)
    load_weights(model, shape_of(path), str(path), "--hf-checkpoint")
    return model.train()


def _micro_batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, VOCAB, (length,), generator=generator) for length in (17, 5, 30)]


def _forward(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    from slime.backends.megatron_utils.model.attention import packed_segments

    segments = packed_segments(torch.tensor([0, len(tokens)], dtype=torch.int32), len(tokens))
    return model(tokens[None], torch.arange(len(tokens))[None], None, packed_seq_params=segments)


def _flip_routers(model: Any) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "router" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(9)))


@pytest.mark.parametrize("recompute", [{}, _RECOMPUTE], ids=["plain", "recompute"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3"])
def test_after_the_weights_changed_the_recorded_experts_are_chosen_again(
    kind: str, recompute: dict[str, Any], tmp_path: Path
) -> None:
    from slime.backends.megatron_utils.model.routing_replay import RoutingReplay

    model = _load(kind, tmp_path / "hf", **recompute)
    replay = RoutingReplay(model)
    batches = _micro_batches()
    with replay.recording(), torch.no_grad():
        unchanged = [_forward(model, tokens) for tokens in batches]
    recorded = [[choice.clone() for choice in router.recorded] for router in replay.routers]
    assert [len(choices) for choices in recorded] == [len(batches)] * 2  # layers with experts
    _flip_routers(model)

    with replay.recording():
        changed = [_forward(model, tokens) for tokens in batches]
    own = [router.recorded[0] for router in replay.routers]
    assert any(not torch.equal(a, choices[0]) for a, choices in zip(own, recorded, strict=True)), "choices did flip"

    for router, choices in zip(replay.routers, recorded, strict=True):
        router.recorded = list(choices)
    seen: list[list[torch.Tensor]] = [[] for _ in replay.routers]
    for router, kept in zip(replay.routers, seen, strict=True):
        _spy(router, kept)
    with replay.replaying():
        outputs = [_forward(model, tokens) for tokens in batches]
        for output in outputs:  # the order of a pipeline: all forward, then all backward
            output.float().pow(2).mean().backward()
    for output, before, other in zip(outputs, unchanged, changed, strict=True):
        assert not torch.equal(output, before), "scores are those of the current weights"
        assert not torch.equal(output, other)
    for kept, choices in zip(seen, recorded, strict=True):
        times = 2 if recompute else 1
        assert len(kept) == times * len(batches)
        for position, indices in enumerate(kept):
            assert torch.equal(indices, choices[position % len(batches)].long())
    router_gradients = [p.grad for name, p in model.named_parameters() if "router.weight" in name]
    assert all(gradient.abs().sum() > 0 for gradient in router_gradients)


def _spy(router: Any, kept: list[torch.Tensor]) -> None:
    original = router.get_replay_topk

    def get(*arguments: Any, **keywords: Any) -> Any:
        probs, indices = original(*arguments, **keywords)
        kept.append(indices)
        return probs, indices

    router.get_replay_topk = get


def test_replay_of_unchanged_weights_changes_nothing_and_off_means_off(tmp_path: Path) -> None:
    from slime.backends.megatron_utils.model.routing_replay import RoutingReplay

    model = _load("qwen3_moe", tmp_path / "hf")
    replay = RoutingReplay(model)
    (tokens, *_) = _micro_batches()
    with torch.no_grad():
        before = _forward(model, tokens)
        assert not replay.is_recorded
        with replay.recording():
            recorded = _forward(model, tokens)
        assert replay.is_recorded
        with replay.replaying():
            replayed = _forward(model, tokens)
    assert torch.equal(before, recorded)
    assert torch.equal(before, replayed)
    assert not replay.is_recorded


def test_passes_that_do_not_match_the_recorded_ones_are_errors(tmp_path: Path) -> None:
    from slime.backends.megatron_utils.model.routing_replay import RoutingReplay

    model = _load("qwen3_moe", tmp_path / "hf")
    replay = RoutingReplay(model)
    first, second, _ = _micro_batches()

    def record() -> None:
        with replay.recording(), torch.no_grad():
            _forward(model, first)
            _forward(model, second)

    def repeat(*batches: torch.Tensor) -> None:
        record()
        with replay.replaying():
            for tokens in batches:
                _forward(model, tokens)

    with pytest.raises(RuntimeError, match=r"layer 0: the choices of \(17, 2\) do not fit .*\(5, 2\)"):
        repeat(second)
    with pytest.raises(RuntimeError, match=r"layer 0: no choices are left after 2"):
        repeat(first, second, first)
    with pytest.raises(RuntimeError, match=r"choices of layers \[0, 2\] were not used"):
        repeat(first)


def test_the_engines_choices_are_laid_out_as_the_ranks_hold_the_tokens() -> None:
    """Two samples of 3 and 5 tokens and a segment of padding, in segments of multiples of 2 * CP.

    segment    a a a .     b b b b b . . .     . . . .        a dot and every last token get experts in turn
    chunk      0 1 2 3     0 0 1 1 2 2 3 3     0 1 2 3        rank 0 holds chunks 0 and 3, rank 1 chunks 1 and 2
    """
    from slime.backends.megatron_utils.model.routing_replay import lay_out
    from slime.backends.training.context_parallel import Sharding

    layers, topk, num_experts = 2, 2, 8
    a, b = (
        100 * which + torch.arange(rows * layers * topk).view(rows, layers, topk) for which, rows in ((1, 2), (2, 4))
    )
    cu_seqlens = torch.tensor([0, 4, 12, 16])

    def filler(row: int) -> torch.Tensor:
        return torch.tensor([[(2 * row) % num_experts, (2 * row + 1) % num_experts]] * layers)

    whole = [*a, filler(2), filler(3), *b, *(filler(row) for row in range(8, 16))]

    def rows(*numbers: int) -> torch.Tensor:
        return torch.stack([whole[number] for number in numbers])

    def laid_out(sharding: Sharding, tensor_rank: int = 0, tensor_size: int = 1) -> torch.Tensor:
        ranks = {"tensor_rank": tensor_rank, "tensor_size": tensor_size}
        return lay_out([a, b], cu_seqlens, sharding, num_experts=num_experts, **ranks)

    assert torch.equal(laid_out(Sharding()), rows(*range(16)))
    first, second = (0, 3, 4, 5, 10, 11, 12, 15), (1, 2, 6, 7, 8, 9, 13, 14)
    assert torch.equal(laid_out(Sharding(cp_rank=0, cp_size=2)), rows(*first))
    assert torch.equal(laid_out(Sharding(cp_rank=1, cp_size=2)), rows(*second))
    for tensor_rank in range(2):
        part = slice(4 * tensor_rank, 4 * tensor_rank + 4)
        # 4: two tensor ranks whose tokens come in pairs, as FP8 products need them in multiples of 16
        for multiple in (2, 4):
            both = Sharding(cp_rank=1, cp_size=2, sequence_multiple=multiple)
            assert torch.equal(laid_out(both, tensor_rank, 2), rows(*second[part]))
    # FP8 on one tensor rank: the router sees all rows
    assert torch.equal(laid_out(Sharding(sequence_multiple=16)), rows(*range(16)))


def test_given_choices_are_taken_whatever_the_routers_prefer(tmp_path: Path) -> None:
    from slime.backends.megatron_utils.model.routing_replay import RoutingReplay

    model = _load("qwen3_moe", tmp_path / "hf")
    replay = RoutingReplay(model)
    batches = _micro_batches()
    generator = torch.Generator().manual_seed(4)
    given = [torch.rand(len(tokens), 3, 8, generator=generator).topk(2).indices for tokens in batches]
    seen: list[list[torch.Tensor]] = [[] for _ in replay.routers]
    for router, kept in zip(replay.routers, seen, strict=True):
        _spy(router, kept)
    with replay.replaying(given), torch.no_grad():
        outputs = [_forward(model, tokens) for tokens in batches]
    for router, kept in zip(replay.routers, seen, strict=True):
        assert all(torch.equal(ours, theirs[:, router.layer]) for ours, theirs in zip(kept, given, strict=True))
    with torch.no_grad():
        own = _forward(model, batches[0])
    assert not torch.equal(own, outputs[0])


class OwnRouter(torch.nn.Module):
    """A router of a user's model, which is none of Megatron's."""

    def __init__(self) -> None:
        from slime.utils.routing_replay import get_routing_replay_compute_topk, register_routing_replay

        super().__init__()
        self.layer_number, self.config = 2, SimpleNamespace(num_moe_experts=4)
        self.choose = get_routing_replay_compute_topk(lambda scores, topk, **groups: torch.topk(scores, topk))
        register_routing_replay(self)

    def forward(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.choose(scores, 2)


def test_a_router_of_ones_own_replays_once_it_is_registered() -> None:
    from slime.utils.routing_replay import RoutingReplay

    router = OwnRouter()
    first, later = torch.tensor([[4.0, 3, 2, 1]]), torch.tensor([[1.0, 2, 3, 4]])
    assert router(later)[1].tolist() == [[3, 2]], "nothing is replayed yet"
    model = torch.nn.Module()
    model.decoder = torch.nn.ModuleList([router])
    replay = RoutingReplay([model])
    assert [choices.layer for choices in replay.routers] == [1]
    with replay.recording():
        router(first)
    with replay.replaying():
        scores, experts = router(later)
    assert (scores.tolist(), experts.tolist()) == ([[1.0, 2.0]], [[0, 1]])
    assert router(later)[1].tolist() == [[3, 2]]
    assert router.choose(first, 1)[1].tolist() == [[0]], "outside of a registered router it is the function itself"
