"""A checkpoint continues on any layout as if the run had not stopped, and either counts on all ranks or on none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.ranks import ForkServer
from tests.unit.megatron_utils.tiny_families import make_family_checkpoint
from tests.unit.megatron_utils.tiny_trainer import make_hf_model

_CASE = "tests.dist.checkpoint_cases:run"
_COMMON = {"lr": 1e-3, "lr_decay_style": "cosine", "lr_warmup_iters": 1, "weight_decay": 0.1, "num_rollout": 10}
_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp2": (2, {}),
    "tp2-sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "cp2": (2, {"context_parallel_size": 2}),
    "pp2-vpp2": (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
}


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints") / "hf"
    make_hf_model("qwen3", path, num_hidden_layers=4)
    return path


@pytest.fixture(scope="module")
def uninterrupted(ranks: ForkServer, hf: Path) -> dict[str, torch.Tensor]:
    (result,) = ranks.run(_CASE, 1, hf=str(hf), args=_COMMON, rollouts=[0, 1, 2], save_after=[])
    return result["weights"]


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [("one", "tp2-sp"), ("tp2-sp", "pp2"), ("pp2", "dp2"), ("dp2", "cp2"), ("cp2", "one"), ("pp2-vpp2", "one")],
)
def test_a_run_that_is_saved_on_one_layout_continues_on_another(
    saved: str, loaded: str, ranks: ForkServer, hf: Path, uninterrupted: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    size, layout = _LAYOUTS[saved]
    args = _COMMON | layout | {"save": str(tmp_path)}
    first = ranks.run(_CASE, size, hf=str(hf), args=args, rollouts=[0, 1], save_after=[1])
    size, layout = _LAYOUTS[loaded]
    args = _COMMON | layout | {"load": str(tmp_path)}
    second = ranks.run(_CASE, size, hf=str(hf), args=args, rollouts=[2], save_after=[])
    for result in second:
        assert result["error"] == ""
        assert result["start"] == 2
        for name, value in first[0]["weights"].items():
            assert torch.equal(result["weights_at_start"][name], value), name
        for name, value in uninterrupted.items():
            assert torch.allclose(result["weights"][name], value, rtol=0, atol=2e-6), name


@pytest.mark.parametrize("problem", ["model", "tensor"])
def test_weights_that_one_pipeline_stage_cannot_read_are_an_error_on_all(
    problem: str, ranks: ForkServer, hf: Path
) -> None:
    args = _COMMON | {"pipeline_model_parallel_size": 2}
    case = "tests.dist.checkpoint_cases:load_with_a_problem"
    for stage in (0, 1):
        errors = ranks.run(case, 2, hf=str(hf), args=args, problem=problem, on=stage, timeout_s=120)
        assert errors == [f"rank {stage} cannot read a {problem}"] * 2


_AS_MEGATRON = "tests.dist.checkpoint_cases:run_and_save_as_megatron"
_IN_BUCKETS = "dp_reshardable"


@pytest.mark.parametrize(
    ("saved", "loaded", "sharding"),
    [
        ("dp2", "tp2-sp", "fully_reshardable"),
        ("pp2", "dp2", "fully_reshardable"),
        ("dp2", "one", _IN_BUCKETS),
        ("one", "dp2", _IN_BUCKETS),
        ("pp2", "pp2", _IN_BUCKETS),
    ],
)
def test_a_checkpoint_of_megatrons_writer_continues(
    saved: str,
    loaded: str,
    sharding: str,
    ranks: ForkServer,
    hf: Path,
    uninterrupted: dict[str, torch.Tensor],
    tmp_path: Path,
) -> None:
    size, layout = _LAYOUTS[saved]
    args = _COMMON | layout | {"save": str(tmp_path)}
    first = ranks.run(_AS_MEGATRON, size, hf=str(hf), args=args, sharding=sharding)
    size, layout = _LAYOUTS[loaded]
    for result in ranks.run(
        _CASE, size, hf=str(hf), args=_COMMON | layout | {"load": str(tmp_path)}, rollouts=[2], save_after=[]
    ):
        assert (result["error"], result["start"]) == ("", 2)
        assert all(torch.equal(result["weights_at_start"][name], value) for name, value in first[0]["weights"].items())
        for name, value in uninterrupted.items():
            assert torch.allclose(result["weights"][name], value, rtol=0, atol=2e-6), name


@pytest.mark.parametrize(
    ("named", "fits"), [(_IN_BUCKETS, "only the tensor-"), ("fully_sharded_model_space", "the version of Megatron")]
)
def test_optimizer_states_in_another_format_of_megatron_name_what_they_fit(
    named: str, fits: str, ranks: ForkServer, hf: Path, tmp_path: Path
) -> None:
    ranks.run(_AS_MEGATRON, 1, hf=str(hf), args=_COMMON | {"save": str(tmp_path)}, sharding=_IN_BUCKETS)
    common = tmp_path / "iter_0000001/common.pt"
    content = torch.load(common, weights_only=False)
    content["optimizer"]["param_state_sharding_type"] = named
    torch.save(content, common)
    size, layout = _LAYOUTS["pp2"]
    args = _COMMON | layout | {"load": str(tmp_path)}
    for result in ranks.run(_CASE, size, hf=str(hf), args=args, rollouts=[2], save_after=[]):
        assert f"have Megatron's format {named}, and fit {fits}" in result["error"]
        assert "--no-load-optim" in result["error"]
        assert len(result["error"]) < 1500, "the names of all tensors are not listed"


_TP2_DP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
_MEASURE = "tests.dist.checkpoint_cases:measure"
_PIECE = 64 * 1024


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 0.7 million parameters, so that the lists of tensors that ranks exchange are small beside them."""
    path = tmp_path_factory.mktemp("checkpoints") / "wide"
    make_hf_model("qwen3", path, num_hidden_layers=4, hidden_size=128, intermediate_size=384)
    return path


@pytest.mark.parametrize(("num_ranks", "layout"), [(1, {}), (2, {}), (4, _TP2_DP2)], ids=["dp1", "dp2", "tp2-dp2"])
def test_a_save_holds_less_than_a_byte_per_parameter_and_uses_no_collective_of_a_device(
    num_ranks: int, layout: dict[str, Any], ranks: ForkServer, wide: Path, tmp_path: Path
) -> None:
    args = _COMMON | layout | {"save": str(tmp_path)}
    for result in ranks.run(_MEASURE, num_ranks, hf=str(wide), args=args, how="sliced", piece_bytes=_PIECE):
        assert result["extra"] < result["num_parameters"]  # two pieces, and the lists of tensors
        assert (result["left"], result["in_default_group"]) == (0, 0)
        assert result["num_collectives"] >= 5
    sizes = [sum(p.stat().st_size for p in tmp_path.glob(f"iter_0000001/__{rank}_*")) for rank in range(num_ranks)]
    assert max(sizes) < 1.15 * min(sizes)  # copies of the weights are divided, too


def test_a_save_in_the_background_copies_at_most_four_bytes_per_parameter(
    ranks: ForkServer, wide: Path, tmp_path: Path
) -> None:
    args = _COMMON | {"save": str(tmp_path)}
    (result,) = ranks.run(_MEASURE, 1, hf=str(wide), args=args, how="background", piece_bytes=_PIECE)
    assert 3 * result["num_parameters"] < result["extra"] <= 4 * result["num_parameters"] + 2 * _PIECE + 65536


def test_the_count_of_a_save_that_gathers_the_states_shows_it(ranks: ForkServer, wide: Path, tmp_path: Path) -> None:
    args = _COMMON | {"save": str(tmp_path)}
    for result in ranks.run(_MEASURE, 2, hf=str(wide), args=args, how="gathered", piece_bytes=_PIECE):
        assert result["extra"] > 20 * result["num_parameters"]


@pytest.mark.parametrize(("rank", "full_for"), [(1, "shards"), (0, "manifest")])
def test_a_save_that_fails_on_one_rank_is_an_error_on_all_and_changes_no_checkpoint(
    ranks: ForkServer, hf: Path, tmp_path: Path, rank: int, full_for: str
) -> None:
    args = _COMMON | {"tensor_model_parallel_size": 2, "sequence_parallel": True, "save": str(tmp_path)}
    ranks.run(_CASE, 2, hf=str(hf), args=args, rollouts=[0], save_after=[0])
    full = {"full_disk_on": rank, "full_for": full_for}
    results = ranks.run(_CASE, 2, hf=str(hf), args=args, rollouts=[1], save_after=[1], **full)
    assert all(f"rank {rank}: OSError: [Errno 28] No space left" in result["error"] for result in results)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "0"
    assert [entry.name for entry in tmp_path.glob("iter_*")] == ["iter_0000000"]


def test_a_shard_that_one_rank_finds_damaged_is_an_error_on_all(ranks: ForkServer, hf: Path, tmp_path: Path) -> None:
    args = _COMMON | {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    ranks.run(_CASE, 2, hf=str(hf), args=args | {"save": str(tmp_path)}, rollouts=[0, 1], save_after=[0, 1])
    shard = max((tmp_path / "iter_0000001").glob("__1_*.distcp"), key=lambda path: path.stat().st_size)
    data = bytearray(shard.read_bytes())
    data[-8192:-4096] = bytes(4096)
    shard.write_bytes(data)
    for result in ranks.run(_CASE, 2, hf=str(hf), args=args | {"load": str(tmp_path)}, rollouts=[], save_after=[]):
        assert f"{tmp_path}/iter_0000001 is damaged: {shard.name} has the checksum" in result["error"]
        assert f"--load {tmp_path} --ckpt-step 0 takes it" in result["error"]


def test_a_background_save_on_several_ranks_is_complete_after_the_next_one(
    ranks: ForkServer, hf: Path, tmp_path: Path
) -> None:
    args = _COMMON | {"tensor_model_parallel_size": 2, "sequence_parallel": True, "async_save": True}
    first = ranks.run(
        _CASE, 2, hf=str(hf), args=args | {"save": str(tmp_path)}, rollouts=[0, 1, 2, 9], save_after=[0, 2, 9]
    )
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "9"
    (result,) = ranks.run(_CASE, 1, hf=str(hf), args=_COMMON | {"load": str(tmp_path)}, rollouts=[], save_after=[])
    assert all(torch.equal(result["weights"][name], value) for name, value in first[0]["weights"].items())


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models with experts, in directories named for their family."""
    path = tmp_path_factory.mktemp("checkpoints")
    for family in ("deepseek_v3", "glm_moe_dsa", "minimax_m2", "qwen3_next"):
        make_family_checkpoint(family, path / family)
    return path


_EXPERTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep2": (2, {"expert_model_parallel_size": 2}),
    "tp2-ep2": (
        2,
        {
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "expert_model_parallel_size": 2,
            "expert_tensor_parallel_size": 1,
        },
    ),
    "tp2": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
}


@pytest.mark.parametrize(
    ("family", "saved", "loaded", "with_optimizer"),
    [
        ("deepseek_v3", "ep2", "tp2-ep2", True),
        ("deepseek_v3", "tp2-ep2", "ep2", True),
        ("deepseek_v3", "ep2", "tp2", False),
        ("minimax_m2", "tp2-ep2", "ep2", True),
        ("glm_moe_dsa", "ep2", "tp2-ep2", True),
        ("qwen3_next", "tp2-ep2", "ep2", True),
    ],
)
def test_a_model_with_experts_continues_on_another_layout(
    family: str, saved: str, loaded: str, with_optimizer: bool, ranks: ForkServer, experts: Path, tmp_path: Path
) -> None:
    hf = str(experts / family)
    common = _COMMON | {"no_load_optim": not with_optimizer}
    size, layout = _EXPERTS[saved]
    first = ranks.run(
        _CASE, size, hf=hf, args=common | layout | {"save": str(tmp_path)}, rollouts=[0, 1], save_after=[0]
    )
    size, layout = _EXPERTS[loaded]
    second = ranks.run(_CASE, size, hf=hf, args=common | layout | {"load": str(tmp_path)}, rollouts=[1], save_after=[])
    for result in second:
        assert result["error"] == ""
        assert result["start"] == 1
        for name, value in first[0]["weights"].items() if with_optimizer else ():
            assert torch.allclose(result["weights"][name], value, rtol=0, atol=2e-5), name


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_states_in_buckets_of_a_model_with_experts_continue(
    family: str, ranks: ForkServer, experts: Path, tmp_path: Path
) -> None:
    """Megatron has an optimizer for the experts beside the other one."""
    hf = str(experts / family)
    size, layout = _EXPERTS["ep2"]
    args = _COMMON | layout | {"save": str(tmp_path)}
    (whole, *_) = ranks.run(_CASE, size, hf=hf, args=args | {"save": None}, rollouts=[0, 1, 2], save_after=[])
    ranks.run(_AS_MEGATRON, size, hf=hf, args=args, sharding=_IN_BUCKETS)
    for result in ranks.run(_CASE, size, hf=hf, args=args | {"load": str(tmp_path)}, rollouts=[2], save_after=[]):
        assert (result["error"], result["start"]) == ("", 2)
        for name, value in whole["weights"].items():
            assert torch.allclose(result["weights"][name], value, rtol=0, atol=2e-6), name


def test_an_optimizer_that_was_saved_with_expert_parallelism_names_the_way_out_without_it(
    ranks: ForkServer, experts: Path, tmp_path: Path
) -> None:
    args = _COMMON | _EXPERTS["ep2"][1] | {"save": str(tmp_path)}
    hf = str(experts / "deepseek_v3")
    ranks.run(_CASE, 2, hf=hf, args=args, rollouts=[0], save_after=[0])
    (result,) = ranks.run(_CASE, 1, hf=hf, args=_COMMON | {"load": str(tmp_path)}, rollouts=[], save_after=[])
    assert "--no-load-optim" in result["error"]
