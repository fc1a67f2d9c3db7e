"""The trainer against transformers and plain torch: logits, weights, log-probs, gradients, updates. One process."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils.actor import MegatronTrainer
from slime.backends.training.data import TrainBatch
from slime.utils.errors import SlimeError
from tests.unit.megatron_utils.tiny_trainer import (
    VOCAB,
    make_args,
    make_batch,
    make_hf_model,
    schedule,
    with_sampling_sets,
)
from tests.verification import verify

_LOOP = "a loop over tokens, torch AdamW"
KINDS = ("qwen3", "qwen2", "llama", "llama3")


pytestmark = pytest.mark.usefixtures("trainer_rank")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Any]]:
    made: dict[str, tuple[Path, Any]] = {}

    def get(kind: str, **overrides: Any) -> tuple[Path, Any]:
        key = f"{kind}{overrides}"
        if key not in made:
            path = tmp_path_factory.mktemp(kind)
            made[key] = (path, make_hf_model(kind, path, **overrides))
        return made[key]

    return get


def _trainer(path: Path, *, with_ref: bool = False, **overrides: Any) -> MegatronTrainer:
    trainer = MegatronTrainer(make_args(path, **overrides), rank=0, world_size=1, with_ref=with_ref)
    assert trainer.setup() == 0
    return trainer


def _packed_logits(trainer: MegatronTrainer, batch: dict[str, Any]) -> list[torch.Tensor]:
    """Logits of every sample, all packed in one micro-batch."""
    from slime.backends.megatron_utils.model.attention import segments_of
    from slime.backends.megatron_utils.step import run_model
    from slime.backends.training.data import TrainBatch

    whole = schedule(batch, [list(range(len(batch["tokens"])))], size=len(batch["tokens"]))
    micro_batch = next(TrainBatch(whole, torch.device("cpu")).micro_batches(0, all_rows=True))
    with torch.no_grad():
        logits = run_model(trainer._ready.chunks[0], micro_batch, segments_of(micro_batch))[0, :, :VOCAB].float()
    return list(logits.split([len(t) for t in batch["tokens"]]))


@pytest.mark.parametrize("kind", KINDS)
def test_packed_logits_equal_transformers_on_each_sequence_alone(kind: str, checkpoint: Any) -> None:
    path, hf = checkpoint(kind)
    batch = make_batch(9, seed=3)
    batch["tokens"][1] = (
        torch.arange(200) % VOCAB
    )  # long enough for every llama3 frequency band and its own padding group
    for tokens, ours in zip(batch["tokens"], _packed_logits(_trainer(path), batch), strict=True):
        with torch.no_grad():
            reference = hf(tokens[None]).logits[0]
        assert reference.abs().max() > 1
        verify("logits of packed sequences", "transformers, each alone", ours, reference, tolerance=1e-5)


def test_log_probs_of_a_cut_vocabulary_are_those_of_transformers_over_the_sampled_sets(checkpoint: Any) -> None:
    path, hf = checkpoint(KINDS[0])
    batch = with_sampling_sets(make_batch(6, seed=3))
    ours = _trainer(path, rollout_top_p=0.9)._log_probs(TrainBatch(batch, torch.device("cpu")))
    for index, (tokens, length) in enumerate(zip(batch["tokens"], batch["response_lengths"], strict=True)):
        with torch.no_grad():
            logits = hf(tokens[None]).logits[0, -length - 1 : -1]
        ids, borders = (batch[f"rollout_top_p_token_{name}"][index] for name in ("ids", "offsets"))
        kept = torch.zeros_like(logits, dtype=torch.bool)
        for row, (begin, end) in enumerate(pairwise(borders.tolist())):
            kept[row, ids[begin:end].long()] = True
        cut = logits.masked_fill(~kept, -torch.inf).log_softmax(-1)
        reference = cut.gather(1, tokens[-length:, None]).squeeze(1)
        verify(
            "log-probs of a cut vocabulary", "transformers over the same ids", ours[index], reference, tolerance=1e-5
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [False, True])
def test_exported_weights_equal_the_loaded_ones_bit_for_bit(kind: str, tied: bool, checkpoint: Any) -> None:
    path, hf = checkpoint(kind, tie_word_embeddings=tied)
    exported = dict(_trainer(path).export_weights())
    expected = {name: value for name, value in hf.state_dict().items() if not (tied and name == "lm_head.weight")}
    assert exported.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(exported[name], value), name


def test_a_saved_hf_checkpoint_loads_in_transformers_and_keeps_the_other_files(checkpoint: Any, tmp_path: Path) -> None:
    import transformers

    path, hf = checkpoint("qwen3")
    (path / "tokenizer_config.json").write_text("{}")
    target = tmp_path / "new" / "export"
    trainer = _trainer(path)
    trainer.save_hf(str(target))
    trainer.save_hf(str(target))  # an existing export is replaced
    assert (target / "tokenizer_config.json").read_text() == "{}"
    assert [entry.name for entry in target.parent.iterdir()] == ["export"]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    for name, value in hf.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


def test_an_export_of_several_files_has_an_index_that_names_every_tensor(
    checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slime.backends.training import hf_files

    monkeypatch.setattr(hf_files, "_MAX_FILE_BYTES", 10_000)
    path, hf = checkpoint("llama")
    _trainer(path).save_hf(str(tmp_path / "parts"))
    assert len(list((tmp_path / "parts").glob("model-*-of-*.safetensors"))) > 3
    again = dict(_trainer(tmp_path / "parts").export_weights())
    assert all(torch.equal(again[name], value) for name, value in hf.state_dict().items())


def test_save_hf_refuses_to_overwrite_its_own_source(checkpoint: Any) -> None:
    path, _ = checkpoint("qwen3")
    with pytest.raises(SlimeError, match="is the same directory as --hf-checkpoint"):
        _trainer(path).save_hf(str(path))


def _hf_log_probs(hf: Any, batch: dict[str, Any], temperature: float = 1.0) -> list[torch.Tensor]:
    """Sequence by sequence, token by token."""
    results = []
    for tokens, length in zip(batch["tokens"], batch["response_lengths"], strict=True):
        table = (hf(tokens[None]).logits[0] / temperature).log_softmax(-1)
        prompt = len(tokens) - length
        results.append(torch.stack([table[prompt + t - 1, tokens[prompt + t]] for t in range(length)]))
    return results


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [-1, 5])
def test_log_probs_equal_transformers_in_the_order_of_the_samples(
    temperature: float, chunk: int, checkpoint: Any
) -> None:
    from slime.backends.training.data import TrainBatch

    path, hf = checkpoint("qwen3")
    batch = schedule(make_batch(), [[5, 0, 3, 1], [2, 7, 4, 6]])
    trainer = _trainer(path, rollout_temperature=temperature, log_probs_chunk_size=chunk)
    ours = trainer._log_probs(TrainBatch(batch | {"global_batch_sizes": [4, 4]}, torch.device("cpu")))
    with torch.no_grad():
        reference = _hf_log_probs(hf, batch, temperature)
    for mine, other in zip(ours, reference, strict=True):
        verify("log-probs of responses", "transformers", mine, other, tolerance=1e-5)


def _oracle_loss(hf: Any, batch: dict[str, Any], samples: list[int], old: Any, ref: Any, settings: Any) -> torch.Tensor:
    """GRPO token by token: clipped ratio, k3 estimate of the KL, mean per rollout or over all tokens."""
    new = _hf_log_probs(hf, batch)
    total, num_tokens = torch.zeros(()), 0
    for i in samples:
        sample, trained = torch.zeros(()), 0
        for t in range(batch["response_lengths"][i]):
            if not batch["loss_masks"][i][t]:
                continue
            ratio = (new[i][t] - old[i][t]).exp()
            clipped = ratio.clamp(1 - settings.eps_clip, 1 + settings.eps_clip)
            advantage = batch["rewards"][i]
            x = ref[i][t] - new[i][t]
            sample = sample - torch.minimum(ratio * advantage, clipped * advantage)
            sample = sample + settings.kl_loss_coef * (x.exp() - x - 1)
            trained += 1
        total = total + (sample if settings.calculate_per_token_loss else sample / max(trained, 1))
        num_tokens += trained
    return total / (num_tokens if settings.calculate_per_token_loss else len(samples))


@pytest.mark.parametrize("per_token", [False, True])
def test_two_grpo_steps_equal_a_per_token_loop_with_torch_adamw(per_token: bool, checkpoint: Any) -> None:
    import copy

    path, original = checkpoint("qwen3")
    hf = copy.deepcopy(original)
    batch = make_batch(seed=11) | {"global_batch_sizes": [4, 4]}
    steps = [[0, 1, 2, 3], [4, 5, 6, 7]]
    batch = schedule(batch, steps)
    trainer = _trainer(
        path,
        with_ref=True,
        use_kl_loss=True,
        kl_loss_coef=0.3,
        kl_loss_type="k3",
        calculate_per_token_loss=per_token,
        weight_decay=0.1,
        clip_grad=0.5,
        global_batch_size=4,
        lr=3e-2,
    )
    matrices = [p for p in hf.parameters() if p.ndim > 1]
    vectors = [p for p in hf.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-2, betas=(0.9, 0.999), eps=1e-8)
    with torch.no_grad():
        old = ref = _hf_log_probs(hf, batch)
    report = trainer.train(0, batch)
    for step, samples in enumerate(steps):
        loss = _oracle_loss(hf, batch, samples, old, ref, trainer._args)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(hf.parameters(), 0.5)
        optimizer.step()
        ours = report.steps[step]
        verify("loss of two GRPO steps with KL", _LOOP, ours["loss"], loss.item(), tolerance=1e-5)
        norms = ours["grad_norm"], norm.item()
        verify("gradient norm of two GRPO steps", _LOOP, *norms, tolerance=1e-4, scale="relative")
    assert report.steps[1]["pg_clipfrac"] > 0  # the second step really left the trust region
    for name, value in trainer.export_weights():
        # Adam divides small gradients by their own size, which amplifies rounding: a few entries differ by 1e-4
        verify("weights after two GRPO steps of 3e-2", _LOOP, value, hf.state_dict()[name], tolerance=5e-4)


def test_sft_gradient_is_that_of_the_mean_negative_log_likelihood(checkpoint: Any) -> None:
    path, hf = checkpoint("llama")
    batch = make_batch(with_rollout=False)
    trainer = _trainer(
        path, loss_type="sft_loss", optimizer="sgd", sgd_momentum=0.0, weight_decay=0.0, clip_grad=0.0, lr=1.0
    )
    before = {name: value.clone() for name, value in trainer.export_weights()}
    report = trainer.train(0, batch)
    log_probs = _hf_log_probs(hf, batch)
    losses = [-(lp * m).sum() / m.sum().clamp(min=1) for lp, m in zip(log_probs, batch["loss_masks"], strict=True)]
    loss = torch.stack(losses).mean()
    loss.backward()
    assert report.steps[0]["loss"] == pytest.approx(loss.item(), abs=1e-5)
    for name, value in trainer.export_weights():
        gradient = dict(hf.named_parameters())[name].grad
        ours = before[name] - value
        verify("gradient of the SFT loss", "transformers and autograd", ours, gradient, tolerance=5e-6, scale="mixed")
    hf.zero_grad()


def test_one_step_per_rollout_reports_log_probs_from_before_the_update(checkpoint: Any) -> None:
    path, hf = checkpoint("qwen3")
    batch = make_batch()
    with torch.no_grad():
        batch["rollout_log_probs"] = _hf_log_probs(hf, batch)
    trainer = _trainer(path)
    first = trainer.train(0, batch)
    assert first.steps[0]["train_rollout_logprob_abs_diff"] < 1e-5
    assert first.rollout["logprob_abs_diff_max"] < 1e-4
    assert first.steps[0]["ppo_kl"] == 0.0
    second = trainer.train(1, batch)
    assert second.steps[0]["train_rollout_logprob_abs_diff"] > 1e-2  # the weights moved, the metric notices


def test_masked_tokens_do_not_count_in_the_largest_log_prob_difference(checkpoint: Any) -> None:
    path, hf = checkpoint("qwen3")
    batch = make_batch()
    with torch.no_grad():
        rollout = _hf_log_probs(hf, batch)
    rollout[0] = rollout[0] + 100  # sample 0 is fully masked
    assert _trainer(path).train(0, batch | {"rollout_log_probs": rollout}).rollout["logprob_abs_diff_max"] < 1e-4


def test_the_reference_model_stays_while_the_policy_moves(checkpoint: Any) -> None:
    path, _ = checkpoint("qwen3")
    trainer = _trainer(path, with_ref=True, use_kl_loss=True, kl_loss_coef=0.0)
    reports = [trainer.train(i, make_batch()) for i in range(3)]
    assert reports[0].steps[0]["kl_loss"] == 0.0
    assert len({report.rollout["ref_log_probs"] for report in reports}) == 1
    assert len({report.rollout["log_probs"] for report in reports}) == 3


def test_another_reference_checkpoint_does_not_leak_into_the_policy(checkpoint: Any, tmp_path: Path) -> None:
    path, hf = checkpoint("qwen3")
    other = tmp_path / "other"
    moved = make_hf_model("qwen3", other)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.mul_(1.1)
    moved.save_pretrained(other)
    trainer = _trainer(path, with_ref=True, use_kl_loss=True, load=str(path), ref_load=str(other))
    assert all(torch.equal(value, hf.state_dict()[name]) for name, value in trainer.export_weights())
    assert trainer.train(0, make_batch()).steps[0]["kl_loss"] != 0.0


def test_bf16_logits_are_close_and_weights_are_exported_in_bf16(checkpoint: Any) -> None:
    path, hf = checkpoint("qwen3")
    trainer = _trainer(path, fp32=False, bf16=True)
    batch = make_batch(4)
    reference = hf.state_dict()
    for name, value in trainer.export_weights():
        assert torch.equal(value, reference[name].bfloat16())
    for tokens, ours in zip(batch["tokens"], _packed_logits(trainer, batch), strict=True):
        with torch.no_grad():
            verify("logits in bf16", "transformers in fp32", ours.float(), hf(tokens[None]).logits[0], tolerance=0.2)
    assert trainer.train(0, batch).steps[0]["grad_norm"] > 0


@pytest.mark.parametrize(
    "recompute",
    [
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "selective"},
    ],
)
def test_recomputing_activations_changes_nothing(recompute: dict[str, Any], checkpoint: Any) -> None:
    path, _ = checkpoint("qwen3")
    plain, again = _trainer(path), _trainer(path, **recompute)
    assert plain.train(0, make_batch()).steps == again.train(0, make_batch()).steps
    for (name, one), (_, other) in zip(plain.export_weights(), again.export_weights(), strict=True):
        assert torch.equal(one, other), name


def test_a_nan_gradient_stops_the_run_before_anything_is_applied_and_leaves_the_batch(
    checkpoint: Any, tmp_path: Path
) -> None:
    path, _ = checkpoint("qwen3")
    trainer = _trainer(path, save=str(tmp_path))
    before = {name: value.clone() for name, value in trainer.export_weights()}
    batch = make_batch()
    batch["rewards"][3] = float("nan")
    batch["sample_indices"] = [100 + index for index in batch["sample_indices"]]
    where = r"gradients are NaN .*ranks \[0\] \(loss of micro-batch 1 of rank 0, samples \[103, 104, 105\]\)"
    with pytest.raises(SlimeError, match=rf"rank 0 failed on rollout 7.*step 0: {where}; nothing was applied"):
        trainer.train(7, batch)
    dump = torch.load(tmp_path / "failed_steps" / "rollout_7_rank_0.pt", weights_only=True)
    assert dump["rollout_id"] == 7
    assert len(dump["batch"]["tokens"]) == 8
    assert all(torch.equal(value, before[name]) for name, value in trainer.export_weights())


def test_a_nan_gradient_is_skipped_on_request_and_counted_up_to_a_limit(checkpoint: Any, tmp_path: Path) -> None:
    path, _ = checkpoint("qwen3")
    trainer = _trainer(path, check_for_nan_in_loss_and_grad=False, output_dir=str(tmp_path))
    before = {name: value.clone() for name, value in trainer.export_weights()}
    good, bad = make_batch(), make_batch()
    bad["rewards"][3] = float("nan")
    (skipped,) = trainer.train(0, bad).steps
    assert math.isnan(skipped["grad_norm"])
    assert skipped["skipped_steps"] == 1
    assert (tmp_path / "failed_steps" / "rollout_0_rank_0.pt").exists()
    assert all(torch.equal(value, before[name]) for name, value in trainer.export_weights())
    (applied,) = trainer.train(1, good).steps
    assert applied["grad_norm"] > 0
    assert applied["skipped_steps"] == 1
    for rollout_id in range(2, 11):
        trainer.train(rollout_id, bad)
    with pytest.raises(SlimeError, match=r"rollout 11, step 0: .* was skipped, as were the 9 before it"):
        trainer.train(11, bad)


def test_the_reference_follows_the_policy_at_its_interval(checkpoint: Any) -> None:
    path, _ = checkpoint("qwen3")
    batch = make_batch(seed=9)
    trainer = _trainer(
        path, with_ref=True, use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k2", ref_update_interval=2
    )
    kl = [trainer.train(rollout_id, batch).steps[0]["kl_loss"] for rollout_id in range(4)]
    assert kl[0] == pytest.approx(0, abs=1e-9)
    assert kl[1] > 1e-6
    assert kl[2] == pytest.approx(0, abs=1e-9)  # copied after rollout 1
    assert kl[3] > 1e-6


def test_zeroed_moments_make_every_rollout_take_adams_first_step(checkpoint: Any) -> None:
    path, _ = checkpoint("qwen3")
    batch = make_batch(seed=9)

    def second_step(**overrides: Any) -> float:
        """Median move of a matrix in the second rollout, whose rewards are the first's negated, in learning rates."""
        trainer = _trainer(path, lr=1e-4, weight_decay=0.0, clip_grad=0.0, **overrides)
        trainer.train(0, batch)
        before = dict(trainer.export_weights())["model.layers.0.mlp.down_proj.weight"].clone()
        trainer.train(1, batch | {"rewards": [-reward for reward in batch["rewards"]]})
        after = dict(trainer.export_weights())["model.layers.0.mlp.down_proj.weight"]
        return float((after - before).abs().median()) / 1e-4

    assert second_step(reset_optimizer_states=True) == pytest.approx(1.0, rel=1e-2)
    assert second_step() < 0.5  # the first step's momentum points the other way


def test_old_log_probs_are_those_of_the_weights_that_generated_the_batch(checkpoint: Any) -> None:
    path, _ = checkpoint("qwen3")
    batch = make_batch(seed=9)
    plain, keeping = _trainer(path), _trainer(path)
    keeping.keep_version("0")
    first = batch | {"generated_by": "0"}
    assert keeping.train(0, first).steps == plain.train(0, batch).steps  # still the live weights
    live = plain.train(1, batch).steps[0]
    stale = keeping.train(1, first).steps[0]
    assert live["ppo_kl"] == 0
    assert stale["ppo_kl"] != 0
    assert stale["loss"] != live["loss"]
    keeping.keep_version("2")
    keeping.train(2, batch | {"generated_by": "2"})
    assert list(keeping._generators) == ["2"]
