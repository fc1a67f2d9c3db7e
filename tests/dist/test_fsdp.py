"""The FSDP backend trains like the Megatron backend, on any number of ranks, and continues from its checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.ranks import ForkServer
from tests.unit.megatron_utils.tiny_trainer import make_batch, make_hf_model, with_shared_prefixes
from tests.verification import verify

Result = dict[str, Any]

_BUILT_IN = "slime.backends.megatron_utils.loss.policy_loss_function"
# equal beginnings do not matter unless they are shared
_BATCHES = [with_shared_prefixes(make_batch(16, seed=seed)) for seed in range(3)]
_OBJECTIVE = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3", "entropy_coef": 0.01}
_OPTIMIZER = {"lr": 1e-3, "weight_decay": 0.1, "lr_decay_style": "cosine", "lr_warmup_iters": 1}


class Runs:
    """Train two steps on each of the batches. Every distinct run happens once."""

    def __init__(self, ranks: ForkServer, directory: Path) -> None:
        self._ranks = ranks
        self.directory = directory
        self._done: dict[str, Result] = {}

    def of(self, backend: str, world_size: int, *, num_rollouts: int = 2, size: int = 3, **settings: Any) -> Result:
        key = repr((backend, world_size, num_rollouts, size, sorted(settings.items())))
        if key not in self._done:
            extra = {name: settings.pop(name) for name in ("save_hf", "offloads") if name in settings}
            self._done[key] = self._ranks.run(
                "tests.dist.data_parallel_cases:run_job",
                world_size,
                hf=str(self.directory / "hf"),
                args={"train_backend": backend, "global_batch_size": 8, **_OBJECTIVE, **_OPTIMIZER, **settings},
                batches=_BATCHES,
                num_rollouts=num_rollouts,
                num_steps=2,
                size=size,
                **extra,
            )[0]
        return self._done[key]


@pytest.fixture(scope="module")
def runs(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    directory = tmp_path_factory.mktemp("fsdp")
    make_hf_model("qwen3", directory / "hf")
    return Runs(ranks, directory)


def _assert_same(left: Result, right: Result) -> None:
    """Metrics within 1e-5 of their size, or within 1e-6 if terms cancel. Weights within 1e-5 after four steps."""
    for a, b in zip(left["reports"], right["reports"], strict=True):
        for mine, other in zip([*a.steps, a.rollout], [*b.steps, b.rollout], strict=True):
            assert mine == pytest.approx(other, rel=1e-5, abs=1e-6)
    for name, value in left["weights"].items():
        verify(
            "weights after four steps, FSDP backend",
            "the Megatron backend",
            value,
            right["weights"][name],
            tolerance=1e-5,
        )


@pytest.mark.parametrize(
    ("world_size", "per_token", "settings"),
    [
        (1, False, {}),
        (2, True, {"context_parallel_size": 2}),
        (2, False, {"share_prefixes": True, "size": 4}),
        (4, False, {"context_parallel_size": 2, "recompute_granularity": "full", "size": 1}),
        (2, False, {"context_parallel_size": 2, "loss_type": "custom_loss", "custom_loss_function_path": _BUILT_IN}),
    ],
    ids=[
        "1 rank",
        "CP 2, token mean",
        "DP 2, shared prefixes",
        "DP 2 x CP 2, other micro-batches, layers recomputed",
        "CP 2, custom loss",
    ],
)
def test_every_layout_gives_the_losses_gradients_and_weights_of_the_megatron_backend(
    runs: Runs, world_size: int, settings: dict[str, Any], per_token: bool
) -> None:
    reference = runs.of("megatron", 1, calculate_per_token_loss=per_token)
    _assert_same(runs.of("fsdp", world_size, calculate_per_token_loss=per_token, **settings), reference)
    assert reference["reports"][1].steps[0]["kl_loss"] > 0


def test_a_run_saved_by_two_ranks_continues_bit_for_bit_and_on_one_rank(runs: Runs) -> None:
    whole = _whole(runs)
    saved = str(runs.directory / "checkpoint")
    runs.of("fsdp", 2, num_rollouts=2, save=saved)
    two = runs.of("fsdp", 2, num_rollouts=3, load=saved)
    assert two["start"] == 2
    assert two["reports"][0].steps == whole["reports"][2].steps
    for name, value in whole["weights"].items():
        verify("weights of a resumed run, FSDP, two ranks", "the uninterrupted run", two["weights"][name], value)
    one = runs.of("fsdp", 1, num_rollouts=3, load=saved)
    assert one["start"] == 2
    assert one["reports"][0].steps[1] == pytest.approx(two["reports"][0].steps[1], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", ["__1_0.distcp", ".metadata", "rng_00001.pt"])
@pytest.mark.parametrize("has_checksums", [True, False])
def test_a_damaged_file_of_a_checkpoint_is_named_on_all_ranks(
    runs: Runs, tmp_path: Path, name: str, has_checksums: bool
) -> None:
    saved = str(runs.directory / "checkpoint")
    runs.of("fsdp", 2, num_rollouts=2, save=saved)
    damaged = Path(shutil.copytree(saved, tmp_path / "damaged"))
    path = damaged / "iter_0000001" / name
    path.write_bytes(bytes(path.stat().st_size))
    if not has_checksums:
        manifest = path.with_name("manifest.json")
        content = json.loads(manifest.read_text())
        del content["checksums"]
        manifest.write_text(json.dumps(content))
    why = f"{name} has the checksum" if has_checksums else f"cannot be read: {name} is empty or begins with zeros"
    with pytest.raises(AssertionError, match=why) as error:
        runs.of("fsdp", 2, num_rollouts=3, load=str(damaged))
    assert "weights_only" not in str(error.value)


def test_weights_of_a_checkpoint_without_its_optimizer_begin_a_new_run_of_this_backend_only(runs: Runs) -> None:
    saved = str(runs.directory / "finetune")
    runs.of("fsdp", 2, num_rollouts=1, save=saved, no_save_optim=True, no_save_rng=True)
    fresh = runs.of("fsdp", 1, num_rollouts=1, load=saved, finetune=True)
    assert fresh["start"] == 0
    first, again = _whole(runs)["reports"][0].steps[0], fresh["reports"][0].steps[0]
    assert again["lr-pg_0"] == first["lr-pg_0"]
    assert again["loss"] != first["loss"]
    with pytest.raises(AssertionError, match="was written with --train-backend fsdp"):
        runs.of("megatron", 1, num_rollouts=2, load=saved)


def test_memory_that_was_given_back_comes_back_bit_for_bit(runs: Runs) -> None:
    offloaded, plain = runs.of("fsdp", 2, num_rollouts=3, offloads=True), _whole(runs)
    assert [report.steps for report in offloaded["reports"]] == [report.steps for report in plain["reports"]]
    assert all(torch.equal(offloaded["weights"][name], value) for name, value in plain["weights"].items())


def test_an_hf_export_holds_the_trained_weights(runs: Runs) -> None:
    from safetensors.torch import load_file

    trained = _whole(runs)
    exported, initial = (load_file(runs.directory / name / "model.safetensors") for name in ("export", "hf"))
    assert set(exported) == set(initial)
    assert all(torch.equal(exported[name], value) for name, value in trained["weights"].items())
    assert max((value - initial[name]).abs().max() for name, value in exported.items()) > 1e-3


def _whole(runs: Runs) -> Result:
    """Three rollouts on two ranks, without interruption."""
    return runs.of("fsdp", 2, num_rollouts=3, save_hf=str(runs.directory / "export"))


def test_adapters_train_alike_on_any_number_of_ranks_and_as_with_the_megatron_backend(
    runs: Runs, tmp_path: Path
) -> None:
    lora = {"lora_rank": 4, "lora_alpha": 8.0}
    runs.of("fsdp", 1, num_rollouts=1, save_hf=str(tmp_path / "adapter"), **lora)
    # merged weights show the adapters, too
    start = {**lora, "lora_adapter_path": str(tmp_path / "adapter"), "lora_merge": True}
    two = runs.of("fsdp", 2, context_parallel_size=2, **start)
    _assert_same(two, runs.of("fsdp", 1, **start))
    _assert_same(two, runs.of("megatron", 1, **start))
