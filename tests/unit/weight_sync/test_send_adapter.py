"""Adapters on their way: who gets the base, what is sent, and what the answers of engines prove."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from slime.backends import EVERY_RANK, AdapterProof, NamedTensor, Probe, Recipients
from slime.models.lora import LoraConfig
from slime.utils.errors import EngineError
from slime.weight_sync.probe import probe_ids, verify_adapter
from slime.weight_sync.send_adapter import AdapterUpdater, served_config
from slime.weight_sync.session import ALONE, WeightUpdate
from tests.unit.weight_sync.fakes import RecordingFleet

LORA = LoraConfig(rank=4, alpha=8.0, rslora=True)
TENSORS: list[NamedTensor] = [
    ("model.layers.0.self_attn.q_proj.lora_A.weight", torch.randn(4, 6)),
    ("model.layers.0.self_attn.q_proj.lora_B.weight", torch.randn(8, 4, dtype=torch.bfloat16)),
]


class Trainer:
    is_weight_source = True

    def export_weights(self, bucket_bytes: int = 0, recipients: Recipients = EVERY_RANK) -> Iterator[NamedTensor]:
        raise AssertionError("only the base's updater exports weights")

    def export_adapter(self, bucket_bytes: int = 0, recipients: Recipients = EVERY_RANK) -> Iterator[NamedTensor]:
        yield from TENSORS

    def save_hf(self, path: str) -> None:
        raise AssertionError("an adapter is not exported")


class Base:
    """The updater for weights. Records the engines and whether they continue."""

    changed_share = None
    failure: Exception | None = None

    def __init__(self) -> None:
        self.sent: list[tuple[list[str], bool]] = []

    def update(self, fleet: Any, trainer: Any, update: WeightUpdate) -> int:
        self.sent.append(([engine.url for engine in fleet.engines], update.continues))
        if self.failure is not None:
            raise self.failure
        return 1000

    def disconnect(self) -> None: ...


def update(version: str, **settings: Any) -> WeightUpdate:
    return WeightUpdate(version=version, max_chunk_bytes=None, timeout_s=5.0, **settings)


def sync(updater: AdapterUpdater, fleet: RecordingFleet, version: str) -> int:
    fleet.verbs.clear()
    fleet.version = version
    return updater.update(fleet, Trainer(), update(version))  # type: ignore[arg-type]


def test_the_base_goes_once_to_each_engine_which_stays_paused_until_it_has_the_adapter():
    base, fleet = Base(), RecordingFleet()
    updater = AdapterUpdater(ALONE, LORA, base, lambda trainer, path: None)  # type: ignore[arg-type]
    first = sync(updater, fleet, "0")
    assert base.sent == [(["http://a", "http://b"], False)]
    assert fleet.verbs == [
        *("stage_adapter", "pause_generation", "flush_cache", "load_staged_adapter"),
        *("weight_version", "continue_generation"),
    ]
    fleet.version = "0"
    fleet.verbs.clear()
    fleet.answers["weight_version"] = iter(["0", "1"]).__next__
    second = updater.update(fleet, Trainer(), update("1"))  # type: ignore[arg-type]
    assert len(base.sent) == 1
    assert second == first - 1000


def test_an_engine_that_does_not_report_the_last_version_gets_the_base():
    base, fleet = Base(), RecordingFleet()
    updater = AdapterUpdater(ALONE, LORA, base, lambda trainer, path: None)  # type: ignore[arg-type]
    sync(updater, fleet, "0")
    fleet.answers["weight_version"] = iter(["default", "1"]).__next__
    updater.update(fleet, Trainer(), update("1"))  # type: ignore[arg-type]
    assert base.sent[1] == (["http://a", "http://b"], False)


def test_an_adapter_that_cannot_be_staged_pauses_no_engine():
    fleet = RecordingFleet(stage_adapter=EngineError("no memory"))
    updater = AdapterUpdater(ALONE, LORA, Base(), lambda trainer, path: None)  # type: ignore[arg-type]
    updater._version = fleet.version = "0"
    with pytest.raises(EngineError, match="no memory"):
        updater.update(fleet, Trainer(), update("0"))  # type: ignore[arg-type]
    assert fleet.verbs == ["weight_version", "stage_adapter"]


def test_after_an_attempt_that_failed_only_engines_with_half_a_base_get_the_base_again():
    base, fleet = Base(), RecordingFleet()
    updater = AdapterUpdater(ALONE, LORA, base, lambda trainer, path: None)  # type: ignore[arg-type]
    sync(updater, fleet, "0")
    # every engine has the new version, but one died before it had the adapter
    fleet.answers["load_staged_adapter"] = EngineError("b died")
    with pytest.raises(EngineError, match="b died"):
        sync(updater, fleet, "0")
    del fleet.answers["load_staged_adapter"]
    fleet.answers["weight_version"] = "1"
    updater.update(fleet, Trainer(), update("1"))  # type: ignore[arg-type]
    assert len(base.sent) == 1
    # the base of a restarted engine fails after its first bucket, which has set the version
    fleet.answers["weight_version"] = "default"
    base.failure = EngineError("half a base")
    with pytest.raises(EngineError, match="half a base"):
        updater.update(fleet, Trainer(), update("2"))  # type: ignore[arg-type]
    base.failure, fleet.answers["weight_version"] = None, "2"
    updater.update(fleet, Trainer(), update("2"))  # type: ignore[arg-type]
    assert len(base.sent) == 3


def test_a_request_holds_all_tensors_their_checksums_and_the_scale_that_sglang_computes():
    fleet = RecordingFleet()
    sync(AdapterUpdater(ALONE, LORA, Base(), lambda trainer, path: None), fleet, "0")  # type: ignore[arg-type]
    staged, content = dict(fleet.calls)["stage_adapter"], dict(fleet.calls)["load_staged_adapter"]
    flat = torch.frombuffer(bytearray(staged["tensors"]), dtype=torch.uint8)
    for entry in staged["metadata"]:
        part = flat[entry.start_idx : entry.end_idx].view(entry.dtype).reshape(entry.shape)
        assert torch.equal(part, dict(TENSORS)[entry.name])
        digest = hashlib.sha256(part.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        assert content["checksums"][entry.name] == digest
    config = content["config"]
    assert config["lora_alpha"] / config["r"] == LORA.scale == 4.0
    assert served_config(TENSORS, LORA)["target_modules"] == ["q_proj"]


@pytest.mark.parametrize("verb", ["load_staged_adapter", "flush_cache"])
def test_engines_continue_after_an_adapter_that_was_refused(verb: str):
    fleet = RecordingFleet(**{verb: EngineError("rank 3 is too large")})
    updater = AdapterUpdater(ALONE, LORA, Base(), lambda trainer, path: None)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="rank 3 is too large"):
        sync(updater, fleet, "0")
    assert fleet.verbs[-1] == "continue_generation"


def test_engines_that_have_the_base_continue_if_the_adapter_cannot_be_staged():
    fleet = RecordingFleet(stage_adapter=EngineError("no memory"))
    updater = AdapterUpdater(ALONE, LORA, Base(), lambda trainer, path: None)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="no memory"):
        updater.update(fleet, Trainer(), update("0"))  # type: ignore[arg-type]
    assert fleet.verbs == ["stage_adapter", "continue_generation"]
    fleet.verbs.clear()
    with pytest.raises(EngineError, match="no memory"):
        updater.update(fleet, Trainer(), update("0", comes_again=True))  # type: ignore[arg-type]
    assert fleet.verbs == ["stage_adapter"]


def test_no_engine_changes_if_the_trainer_cannot_export_the_adapter():
    class Failing(Trainer):
        def export_adapter(self, bucket_bytes: int = 0, recipients: Recipients = EVERY_RANK) -> Iterator[NamedTensor]:
            raise EngineError("no adapter")

    base, fleet = Base(), RecordingFleet()
    updater = AdapterUpdater(ALONE, LORA, base, lambda trainer, path: None)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="no adapter"):
        updater.update(fleet, Failing(), update("0"))  # type: ignore[arg-type]
    assert (fleet.verbs, base.sent) == ([], [])


def test_an_engine_with_another_version_is_an_error():
    fleet = RecordingFleet(weight_version="6")
    updater = AdapterUpdater(ALONE, LORA, Base(), lambda trainer, path: None)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="reports weight version '6' after an update to '0'"):
        sync(updater, fleet, "0")


BASE, EFFECT = [-1.0, -2.0, -3.0], [0.2, -0.1, 0.3]


def scores(scale: float = 1.0, noise: float = 0.0) -> list[float]:
    return [a + scale * b + noise for a, b in zip(BASE, EFFECT, strict=True)]


def ask(
    adapted: list[float] | None, base: list[float] = BASE, before: Probe | None = None, effect: float = 1.0
) -> None:
    answer = {"adapters": ["other"], "adapted": adapted, "base": base}
    fleet = RecordingFleet(probe=lambda token_ids, fields: answer)
    proof = AdapterProof(Probe("4", [5, 6, 7, 8], scores(effect), BASE), {"lora_path": "policy"})
    verify_adapter(fleet, proof, 5.0, before)  # type: ignore[arg-type]


def test_an_engine_that_agrees_passes_in_any_precision():
    ask(scores())
    ask(scores(noise=0.03), base=[value - 0.02 for value in BASE])
    ask(BASE, effect=0.0)
    ask(BASE, base=[value + 0.02 for value in BASE], effect=0.01)


@pytest.mark.parametrize(
    ("adapted", "problem"),
    [
        (None, "the adapter is missing. The engine has other"),
        (BASE, "those of the base model, so requests do not use the adapter"),
        (scores(0.5), "its effect is about 0.50 times the trainer's, so its scale is wrong"),
        ([-1.5, -2.0, -2.7], "the base model agrees to 0, so the adapter is another one"),
    ],
)
def test_a_fault_is_named_with_the_engine_and_the_version(adapted: list[float] | None, problem: str):
    with pytest.raises(EngineError, match="engine http://a, weight version 4: ") as caught:
        ask(adapted)
    assert problem in str(caught.value)


def test_an_adapter_of_the_sync_before_is_stale():
    before = Probe("3", [5, 6, 7, 8], scores(-1.0), BASE)
    with pytest.raises(EngineError, match="they are those of version 3, so the adapter is stale"):
        ask(scores(-1.0), before=before)


def test_without_precision_equal_answers_still_show_that_requests_do_not_use_the_adapter():
    noisy = [value + 0.05 for value in BASE]
    with pytest.raises(EngineError, match="requests do not use the adapter"):
        ask(noisy, base=noisy)


@pytest.mark.parametrize("vocab_size", [2, 58, 151_936])
def test_the_tokens_of_a_probe_are_in_the_vocabulary(vocab_size: int):
    assert all(0 <= token < vocab_size for token in probe_ids(vocab_size))
