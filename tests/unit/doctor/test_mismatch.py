"""Put each cause into a real tiny model. The doctor has to name it. transformers is model and reference."""

from __future__ import annotations

import copy
import functools
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.algorithms.arguments import AlgorithmArgs, DistillationArgs
from slime.backends.training.credit import passes_needed
from slime.data.sample import Sample
from slime.doctor.mismatch import diagnose
from slime.doctor.mismatch_command import _settings
from slime.doctor.mismatch_input import Referee, Row, read_rows_of
from slime.observability.run_info import write_run_info
from slime.observability.sample_record import record_rollout, record_training
from slime.utils.errors import DataError

VOCAB, PROMPT, RESPONSE = 64, 6, 40
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,  # sharper than a fresh model, as a trained one is
}


def dense_model(seed: int = 0) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE)).eval()


def expert_model() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(**SHAPE, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32)
    return Qwen3MoeForCausalLM(config).eval()


@pytest.fixture(scope="module")
def model() -> Any:
    return dense_model()


Score = Callable[[torch.Tensor], torch.Tensor]
"""Token ids -> log-prob of each response token."""


@torch.no_grad()
def log_probs(model: Any, ids: torch.Tensor, temperature: float = 1.0, prompt: int = PROMPT) -> torch.Tensor:
    """The plain definition: one place before each token, logits over temperature."""
    logits = model(input_ids=ids[None]).logits[0].double() / temperature
    return torch.log_softmax(logits, -1)[torch.arange(prompt - 1, len(ids) - 1), ids[prompt:]]


@functools.cache
@torch.no_grad()
def sampled(model: Any, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (PROMPT,), generator=generator)
    for _ in range(RESPONSE):
        chances = model(input_ids=ids[None]).logits[0, -1].softmax(-1)
        ids = torch.cat([ids, torch.multinomial(chances, 1, generator=generator)])
    return ids


def rows(model: Any, engine: Score, trainer: Score | None = None, num: int = 4) -> list[Row]:
    found = []
    for seed in range(num):
        ids = sampled(model, seed)
        mine = log_probs(model, ids) if trainer is None else trainer(ids)
        found.append(Row(ids.tolist(), PROMPT, torch.ones(RESPONSE, dtype=torch.bool), mine, engine(ids).double()))
    return found


def test_sides_that_agree_need_no_explanation(model: Any) -> None:
    verdict = diagnose(rows(model, lambda ids: log_probs(model, ids) + 1e-5), Referee(model, "m"))
    assert verdict.cause == "none"


def test_another_temperature_is_found_with_its_value(model: Any) -> None:
    verdict = diagnose(rows(model, lambda ids: log_probs(model, ids, 0.7)), Referee(model, "m"))
    assert verdict.cause == "temperature"
    assert "temperature 0.7" in verdict.sentence


def test_the_trainers_own_temperature_is_no_mismatch(model: Any) -> None:
    def at_half(ids: torch.Tensor) -> torch.Tensor:
        return log_probs(model, ids, 0.5)

    verdict = diagnose(rows(model, lambda ids: log_probs(model, ids), at_half), Referee(model, "m"), temperature=0.5)
    assert verdict.cause == "temperature"
    assert "temperature 1, the trainer's of 0.5" in verdict.sentence


def test_a_cut_nucleus_is_found_with_its_share(model: Any) -> None:
    @torch.no_grad()
    def engine(ids: torch.Tensor) -> torch.Tensor:
        found = []
        for place in range(PROMPT - 1, len(ids) - 1):
            chances = model(input_ids=ids[None]).logits[0, place].double().softmax(-1)
            kept: list[int] = []
            for token in chances.argsort(descending=True).tolist():
                if float(chances[kept].sum()) >= 0.9:
                    break
                kept.append(token)
            token = int(ids[place + 1])
            mass = chances[kept].sum() if token in kept else torch.tensor(1.0)
            found.append((chances[token] / mass).log())
        return torch.stack(found)

    verdict = diagnose(rows(model, engine), Referee(model, "m"))
    assert verdict.cause == "top-p"
    assert "top-p 0.9," in verdict.sentence


def test_weights_of_another_step_are_found(model: Any) -> None:
    older = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in older.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    data = rows(model, lambda ids: log_probs(older, ids))
    assert diagnose(data, Referee(model, "m")).cause == "weights"
    named = diagnose(data, Referee(model, "m"), other=Referee(older, "step_3"))
    assert (named.cause, "step_3" in named.sentence) == ("weights", True)


def test_one_layer_that_was_not_sent_is_a_matter_of_weights(model: Any) -> None:
    stale = copy.deepcopy(model)
    with torch.no_grad():
        stale.model.layers[1].mlp.down_proj.weight.mul_(0.5)
    verdict = diagnose(rows(model, lambda ids: log_probs(stale, ids)), Referee(model, "m"))
    assert verdict.cause == "weights"


def test_a_trainer_that_is_off_is_told_from_an_engine_that_is(model: Any) -> None:
    other = dense_model(seed=5)
    verdict = diagnose(
        rows(model, lambda ids: log_probs(model, ids), lambda ids: log_probs(other, ids)), Referee(model, "m")
    )
    assert verdict.cause == "weights"
    assert verdict.sentence.startswith("The trainer is the one that is off")


@pytest.mark.parametrize("has_referee", [True, False])
def test_text_that_was_tokenized_again_is_a_matter_of_tokens(model: Any, has_referee: bool) -> None:
    def engine(ids: torch.Tensor) -> torch.Tensor:
        before = ids.clone()
        before[PROMPT + 15] = (before[PROMPT + 15] + 1) % VOCAB
        return log_probs(model, before)

    verdict = diagnose(rows(model, engine), Referee(model, "m") if has_referee else None)
    assert verdict.cause == "tokens"
    assert "first 15 tokens" in verdict.sentence


@pytest.mark.parametrize("places", [1, -1])
def test_log_probs_that_were_shifted_are_found(model: Any, places: int) -> None:
    verdict = diagnose(rows(model, lambda ids: log_probs(model, ids).roll(places)), None)
    assert verdict.cause == "tokens"
    assert "shifted" in verdict.sentence


def test_a_beginning_of_text_that_only_one_side_has_is_found(model: Any) -> None:
    def engine(ids: torch.Tensor) -> torch.Tensor:
        return log_probs(model, torch.cat([ids[:1], ids]), prompt=PROMPT + 1)

    verdict = diagnose(rows(model, engine), Referee(model, "m"))
    assert verdict.cause == "tokens"
    assert "doubled first token" in verdict.sentence


def test_a_mask_over_what_no_engine_sampled_is_found(model: Any) -> None:
    def engine(ids: torch.Tensor) -> torch.Tensor:
        found = log_probs(model, ids)
        found[10:18] = 0.0
        return found

    verdict = diagnose(rows(model, engine), Referee(model, "m"))
    assert verdict.cause == "mask"
    assert "20.0%" in verdict.sentence


@pytest.mark.parametrize("has_referee", [True, False])
def test_rounding_is_no_error_of_anybody(model: Any, has_referee: bool) -> None:
    rounded = copy.deepcopy(model).to(torch.bfloat16)
    verdict = diagnose(rows(model, lambda ids: log_probs(rounded, ids)), Referee(model, "m") if has_referee else None)
    assert verdict.cause == "precision"


def test_experts_that_flip_at_near_ties_are_found() -> None:
    model = expert_model()
    noisy = copy.deepcopy(model)
    for layer in noisy.model.layers:
        layer.mlp.gate.register_forward_hook(_flip_near_ties)
    verdict = diagnose(rows(model, lambda ids: log_probs(noisy, ids)), Referee(model, "m"))
    assert verdict.cause == "routing", verdict


def _flip_near_ties(_: Any, __: Any, output: Any) -> Any:
    """Replace the router's second expert by the third if their logits are nearly equal."""
    logits, scores, chosen = output
    ranked = logits.float().sort(-1, descending=True)
    is_near = (ranked.values[:, 1] - ranked.values[:, 2]) < 0.08
    swapped = torch.where(is_near[:, None] & (chosen == ranked.indices[:, 1:2]), ranked.indices[:, 2:3], chosen)
    return logits, scores, swapped


def test_a_dump_of_the_trainer_and_a_runs_record_are_read(model: Any, tmp_path: Path) -> None:
    ids = sampled(model, 0)
    sample = {
        "tokens": ids,
        "loss_masks": torch.tensor([0, *[1] * (RESPONSE - 1)]),
        "log_probs": log_probs(model, ids).float(),
        "rollout_log_probs": log_probs(model, ids, 0.5).float(),
        "weight_versions": ["3"],
    }
    torch.save({"samples": [sample, sample | {"rollout_log_probs": None}]}, tmp_path / "train.pt")
    (row,) = read_rows_of(tmp_path / "train.pt", None, 8)
    assert (row.num_prompt, len(row.engine), row.versions) == (PROMPT, RESPONSE - 1, ("3",))
    with pytest.raises(DataError, match=r"run\.json"):
        read_rows_of(tmp_path, None, 8)


def test_a_record_is_read_whichever_rank_trained_on_it_and_rows_of_other_samples_are_not(tmp_path: Path) -> None:
    args = Namespace(reward_key=None, hf_checkpoint="m")
    write_run_info(tmp_path, vars(args), ["train.py"])
    samples = [
        Sample(index=10 + i, tokens=[1, 2, 3], response="x", response_length=2, rollout_log_probs=[-1.0, -2.0])
        for i in range(2)
    ]
    record_rollout(tmp_path, samples, rollout_id=4, limit=8, reward_key=None)
    columns = {
        "partition": [0, 1],
        "sample_indices": [10, 99],  # of another execution of this rollout
        "rewards": [0.0, 0.0],
        "log_probs": [torch.tensor([-1.5, -2.5])] * 2,
    }
    record_training(tmp_path, columns, rollout_id=4, limit=8, data_parallel_rank=1)
    (row,) = read_rows_of(tmp_path, None, 8)
    assert row.all_trainer.tolist() == [-1.5, -2.5]


@pytest.mark.parametrize("num_steps", [1, 4])
@pytest.mark.parametrize("use_rollout_logprobs", [False, True])
@pytest.mark.parametrize("loss_type", ["policy_loss", "custom_loss"])
def test_a_run_that_follows_the_advice_has_the_trainers_log_probs(
    tmp_path: Path, num_steps: int, use_rollout_logprobs: bool, loss_type: str
) -> None:
    torch.save({"samples": []}, tmp_path / "train.pt")
    with pytest.raises(DataError, match="A run has those of the trainer with --use-rollout-entropy,"):
        read_rows_of(tmp_path / "train.pt", None, 8)
    settings = AlgorithmArgs(use_rollout_entropy=True, use_rollout_logprobs=use_rollout_logprobs, loss_type=loss_type)
    assert passes_needed(settings, DistillationArgs(), num_steps=num_steps).old


def test_a_dump_of_plain_values_is_read_without_running_what_a_pickle_may_hold(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    columns = {"log_probs": torch.zeros(2), "rollout_log_probs": torch.zeros(2), "weight_versions": ["3"]}
    sample = {"tokens": torch.arange(4), "loss_masks": torch.ones(2), "sample_index": 1, **columns}
    torch.save({"samples": [sample]}, tmp_path / "train.pt")
    (row,) = read_rows_of(tmp_path / "train.pt", None, 8)
    assert (row.tokens, row.num_prompt, row.versions) == ([0, 1, 2, 3], 2, ("3",))
    assert not caplog.records


@pytest.mark.parametrize(
    ("template", "version", "referee"),
    [("hf_{rollout_id}", 4, "hf_3"), ("hf_3", 4, None), ("hf_{rollout_id}", 5, None), ("hf_{rollout_id}", 0, "model")],
)
def test_the_default_referee_has_exactly_the_weights_that_generated(
    template: str, version: int, referee: str | None, tmp_path: Path
) -> None:
    (tmp_path / "hf_3").mkdir()
    (tmp_path / "hf_3" / "config.json").touch()
    args = Namespace(hf_checkpoint=str(tmp_path / "model"), save_hf=str(tmp_path / template))
    write_run_info(tmp_path, vars(args), ["train.py"])
    options = Namespace(dump=tmp_path, hf_checkpoint=None, temperature=None)
    assert _settings(options, version)[0] == (None if referee is None else str(tmp_path / referee))


@pytest.mark.parametrize("content", [b"", b"no dump", b"\x80\x04K\x01."])
def test_a_file_that_is_no_dump_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "train.pt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=str(path)):
        read_rows_of(path, None, 8)
