"""The trainer on models with experts, latent attention and prediction layers: training, resuming, freezing, replay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils.actor import MegatronTrainer
from slime.utils.errors import ConfigError
from tests.unit.megatron_utils.tiny_families import make_family_checkpoint, saved_tensors
from tests.unit.megatron_utils.tiny_trainer import make_args, make_batch, split_batch, weights_of

_MTP = {"mtp_num_layers": 1}


pytestmark = pytest.mark.usefixtures("trainer_rank")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("families") / kind
            make_family_checkpoint(kind, made[kind])
        return made[kind]

    return get


def _trainer(path: Path, **overrides: Any) -> tuple[MegatronTrainer, int]:
    settings = {"lr": 1e-3, "weight_decay": 0.1, "clip_grad": 1e9} | overrides
    trainer = MegatronTrainer(make_args(path, **settings), rank=0, world_size=1, with_ref=False)
    return trainer, trainer.setup()


def _changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    return {name for name in after if not torch.equal(after[name], before[name])}


@pytest.mark.parametrize("precision", [{}, {"fp32": False, "bf16": True}], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "glm4", "glm4_moe", "deepseek_v3", "mimo"])
def test_a_resumed_run_of_any_family_equals_the_uninterrupted_one_bit_for_bit(
    kind: str, precision: dict[str, Any], checkpoint: Any, tmp_path: Path
) -> None:
    settings = precision | ({"mtp_num_layers": 1, "enable_mtp_training": True} if kind in ("mimo", "glm4_moe") else {})
    straight, _ = _trainer(checkpoint(kind), save=str(tmp_path), **settings)
    before = weights_of(straight)
    straight.train(0, make_batch(seed=0))
    straight.save(0)
    expected = straight.train(1, make_batch(seed=1)).steps
    kept = {name for name in before if "e_score_correction_bias" in name}  # the router's bias is not trained
    changed = _changed(before, weights_of(straight))
    if precision:
        assert changed, "in 16 bits the smallest changes round to nothing"
    else:
        assert changed == before.keys() - kept

    resumed, start = _trainer(checkpoint(kind), load=str(tmp_path), **settings)
    assert start == 1
    assert resumed.train(1, make_batch(seed=1)).steps == expected
    assert _changed(weights_of(straight), weights_of(resumed)) == set()


@pytest.mark.parametrize("optimizer", [{}, {"use_distributed_optimizer": False}, {"optimizer": "muon"}], ids=str)
def test_the_decay_of_delta_nets_is_kept_and_trained_in_fp32_in_a_16_bit_model(
    optimizer: dict[str, Any], checkpoint: Any, tmp_path: Path
) -> None:
    settings = {"fp32": False, "bf16": True, "lr": 1e-6, "use_distributed_optimizer": not optimizer} | optimizer
    trainer, _ = _trainer(checkpoint("qwen3_next"), save=str(tmp_path), **settings)
    source = saved_tensors(checkpoint("qwen3_next"))
    wide = [name for name in source if name.endswith((".A_log", ".dt_bias"))]
    before = weights_of(trainer)
    assert wide
    assert {name for name, value in before.items() if value.dtype == torch.float32} == set(wide)
    assert all(torch.equal(before[name], source[name]) for name in wide)
    trainer.train(0, make_batch())
    after = weights_of(trainer)
    for name in wide:  # a step of Adam is as large as the rate, which is nothing in bfloat16
        steps = (after[name] - before[name]).abs()
        assert steps.min() > 1e-7, name
        assert steps.max() < 1e-5, name
    trainer.save(0)
    expected = trainer.train(1, make_batch(seed=1)).steps
    resumed, _ = _trainer(checkpoint("qwen3_next"), load=str(tmp_path), **settings)
    assert resumed.train(1, make_batch(seed=1)).steps == expected
    assert _changed(weights_of(trainer), weights_of(resumed)) == set()


@pytest.mark.parametrize("kind", ["mimo", "deepseek_v3"])
def test_prediction_layers_train_without_a_trace_in_the_policy(kind: str, checkpoint: Any) -> None:
    path = checkpoint(kind)
    plain, _ = _trainer(path)
    plain_report = plain.train(0, make_batch())
    trained, _ = _trainer(path, **_MTP, enable_mtp_training=True)
    before = weights_of(trained)
    report = trained.train(0, make_batch())
    policy = weights_of(plain)
    after = weights_of(trained)
    assert {name: after[name] for name in policy}.keys() == policy.keys()
    assert all(torch.equal(after[name], value) for name, value in policy.items())
    own = after.keys() - policy.keys()
    assert own
    assert own - _changed(before, after) == {name for name in own if name.endswith("e_score_correction_bias")}
    assert report.steps[0]["mtp_loss"] > 3  # log(61) is 4.1
    assert report.steps[0]["loss"] == plain_report.steps[0]["loss"]
    losses = [trained.train(i, make_batch()).steps[0]["mtp_loss"] for i in range(1, 6)]
    assert losses[-1] < report.steps[0]["mtp_loss"]


def test_prediction_layers_that_are_not_trained_keep_their_weights(checkpoint: Any) -> None:
    path = checkpoint("mimo")
    trainer, _ = _trainer(path, **_MTP)
    report = trainer.train(0, make_batch())
    after, source = weights_of(trainer), saved_tensors(path)
    own = {name for name in source if ".mtp_layers." in name}
    assert own <= after.keys()
    assert not own & _changed({name: source[name] for name in after}, after)
    assert "mtp_loss" not in report.steps[0]


@pytest.mark.parametrize(
    ("flags", "trained"),
    [
        ({"only_train_params_name_list": [r"router\.weight", "final_layernorm"]}, ["gate.weight", "model.norm"]),
        ({"only_train_params_name_list": [r"layers\.2\..*q_layernorm"]}, ["layers.2.self_attn.q_norm"]),
        ({"freeze_params_name_list": ["layernorm", "embedding", "output_layer", "linear_"]}, ["mlp.gate.weight"]),
    ],
    ids=["only-two-kinds", "only-one-layer", "freeze"],
)
def test_only_the_chosen_parameters_are_trained(flags: dict[str, Any], trained: list[str], checkpoint: Any) -> None:
    trainer, _ = _trainer(checkpoint("qwen3_moe"), **flags)
    before = weights_of(trainer)
    trainer.train(0, make_batch())
    changed = _changed(before, weights_of(trainer))
    assert changed == {name for name in before if any(part in name for part in trained)}
    assert changed


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"freeze_params_name_list": ["linear_qvk"]}, r"--freeze-params-name-list linear_qvk finds no parameter"),
        ({"only_train_params_name_list": ["("]}, r"--only-train-params-name-list \(: not a regular expression"),
        ({"freeze_params_name_list": ["."]}, "leaves no parameter to train"),
    ],
)
def test_a_list_that_cannot_be_meant_is_refused(flags: dict[str, Any], message: str, checkpoint: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        _trainer(checkpoint("qwen3_moe"), **flags)


def _two_steps() -> dict[str, Any]:
    return split_batch(make_batch(8, seed=4), 0, 1, num_steps=2)


def test_routing_replay_repeats_the_choices_of_the_old_policy_in_every_step(checkpoint: Any) -> None:
    path = checkpoint("deepseek_v3")
    trainer, _ = _trainer(path, use_routing_replay=True, lr=0.05)
    replay = trainer._replay
    assert replay is not None
    seen: dict[str, list[list[torch.Tensor]]] = {"record": [], "replay": []}
    for router in replay.routers:
        _spy(router, seen)
    trainer.train(0, _two_steps())
    num_micro_batches = sum(_two_steps()["num_microbatches"])
    assert len(seen["record"]) == len(seen["replay"]) == num_micro_batches * len(replay.routers)
    for recorded, replayed in zip(sorted(seen["record"], key=_key), sorted(seen["replay"], key=_key), strict=True):
        assert torch.equal(recorded[1], replayed[1])
    assert not replay.is_recorded, "nothing is kept for the next rollout"

    other, _ = _trainer(path, lr=0.05)
    other.train(0, _two_steps())
    assert _changed(weights_of(other), weights_of(trainer)), "the second step's choices differ without replay"


def _key(entry: list[Any]) -> tuple[int, int]:
    return entry[0], entry[2]


def _spy(router: Any, seen: dict[str, list[Any]]) -> None:
    original, counts = router.get_replay_topk, {"record": 0, "replay": 0}

    def get(*arguments: Any, **keywords: Any) -> Any:
        probs, indices = original(*arguments, **keywords)
        if router.mode in seen:
            seen[router.mode].append([router.layer, indices, counts[router.mode]])
            counts[router.mode] += 1
        return probs, indices

    router.get_replay_topk = get


def test_routing_replay_of_a_model_without_experts_is_refused(checkpoint: Any) -> None:
    with pytest.raises(ConfigError, match="--use-routing-replay: a model of model_type glm4 has no experts"):
        _trainer(checkpoint("glm4"), use_routing_replay=True)


def provide_narrow_head(pre_process: bool, post_process: bool, config: Any, args: Any) -> Any:
    """A user's model: the family's, built by hand."""
    from slime.backends.megatron_utils.layer_specs import block_spec
    from slime.backends.megatron_utils.model.gpt import PackedGPTModel
    from slime.models.hf_shape import read_shape

    shape = read_shape(args.hf_checkpoint)
    model = PackedGPTModel(
        config,
        block_spec(config, shape.family),
        vocab_size=128,
        max_sequence_length=256,
        pre_process=pre_process,
        post_process=post_process,
        position_embedding_type="rope",
        rotary_base=shape.rotary_base,
    )
    model.is_from_user = True
    return model


def provide_nonsense() -> Any:
    return torch.nn.Linear(1, 1)


def test_a_users_function_may_build_the_model(checkpoint: Any) -> None:
    path = checkpoint("qwen3_moe")
    here = f"{__file__}:provide_"
    trainer, _ = _trainer(path, custom_model_provider_path=f"{here}narrow_head")
    from slime.backends.megatron_utils.checkpoint.tensors import chunks_of

    assert chunks_of(trainer._ready.model)[0].is_from_user
    plain, _ = _trainer(path)
    assert trainer.train(0, make_batch()).steps == plain.train(0, make_batch()).steps
    with pytest.raises(ConfigError, match=r"--custom-model-provider-path: the function returned a Linear"):
        _trainer(path, custom_model_provider_path=f"{here}nonsense")


def test_a_reference_has_its_own_router_bias(checkpoint: Any, tmp_path: Path) -> None:
    """The bias is a buffer, not a parameter, but it decides which experts the reference model chooses."""
    import shutil

    from safetensors.torch import save_file

    shutil.copytree(checkpoint("deepseek_v3"), tmp_path / "reference")
    tensors = saved_tensors(tmp_path / "reference")
    for name, value in tensors.items():
        if name.endswith("e_score_correction_bias"):
            tensors[name] = -10 * value
    save_file(tensors, tmp_path / "reference" / "model.safetensors", metadata={"format": "pt"})

    def first_kl(ref_load: Path) -> float:
        args = make_args(
            checkpoint("deepseek_v3"),
            use_kl_loss=True,
            load=str(checkpoint("deepseek_v3")),
            ref_load=str(ref_load),
        )
        trainer = MegatronTrainer(args, rank=0, world_size=1, with_ref=True)
        trainer.setup()
        before = weights_of(trainer)
        kl = trainer.train(0, make_batch()).steps[0]["kl_loss"]
        bias = {name for name in before if name.endswith("e_score_correction_bias")}
        assert not bias & _changed(before, weights_of(trainer)), "the policy has its own again"
        return kl

    assert first_kl(checkpoint("deepseek_v3")) == 0.0
    assert first_kl(tmp_path / "reference") > 1e-3
