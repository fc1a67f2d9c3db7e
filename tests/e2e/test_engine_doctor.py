"""``slime doctor engine`` on the pinned SGLang: three families pass, and every planted defect is named."""

from __future__ import annotations

import base64
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from examples.tiny.vision import make_vision_model
from slime.backends.sglang_utils.external import ExternalEngine, discover_external_engines
from slime.backends.sglang_utils.feature_rules import adapter_words
from slime.backends.sglang_utils.fork_server import ForkServer
from slime.backends.training.arguments import LoraArgs
from slime.cli import main
from slime.data.engine_fields import SAMPLING_MASK
from slime.data.processing import encode_image_for_rollout_engine
from slime.doctor import engine_verbs, examine
from slime.doctor.engine_answers import (
    Trial,
    images,
    penalties,
    prompt_log_probs,
    routed_experts,
    sampled_frequencies,
    sampled_log_probs,
    sampling_sets,
    stops,
)
from slime.doctor.engine_command import ADAPTER_ALPHA, ADAPTER_RANK, findings_of, trial_of
from slime.doctor.engine_golden import Golden
from slime.doctor.engine_verbs import adapters, health, interruptions, weight_updates
from tests.e2e.engines import make_engine
from tests.e2e.moe_model import make_moe_model

REPLAY = "--enable-return-routed-experts"
SAVER = "--enable-memory-saver"
DROPPED = object()


@pytest.fixture(scope="module")
def models(tiny_task: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    moe = str(make_moe_model(tiny_task, root / "moe"))
    return {"dense": tiny_task.model, "moe": moe, "vision": make_vision_model(root / "vision")}


@pytest.fixture(scope="module")
def trials(
    models: dict[str, str], fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Trial]]:
    """The engine of a family beside transformers, started at its first use."""
    root = tmp_path_factory.mktemp("engines")
    found, engines = {}, []

    def trial(name: str) -> Trial:
        if name not in found:
            args = SimpleNamespace(**vars(LoraArgs(lora_rank=ADAPTER_RANK, lora_alpha=ADAPTER_ALPHA)))
            args.hf_checkpoint = models[name]
            flags = {"dense": adapter_words(args), "moe": [REPLAY, SAVER], "vision": []}[name]
            engine = make_engine(SimpleNamespace(model=models[name]), fork_server, root / f"{name}.log", *flags)
            engines.append(engine)
            engine.start()
            found[name] = trial_of(engine, models[name])
        return found[name]

    yield trial
    for engine in engines:
        engine.stop()


@pytest.mark.parametrize("name", ["dense", "moe", "vision"])
def test_the_pinned_engine_passes_every_check(name: str, trials: Any, models: dict[str, str]) -> None:
    engine = trials(name).engine
    found = {finding.what: finding for finding in findings_of(engine, models[name])}
    assert [finding for finding in found.values() if finding.status == "fail"] == []
    warned = {what for what, finding in found.items() if finding.status == "warn"}
    assert warned <= ({"bias and penalty", "restored"} if name == "vision" else {"bias and penalty"})
    skipped = {what for what, finding in found.items() if finding.status == "skip"}
    assert (
        skipped
        == {
            "dense": {"routed experts", "images", "release and resume"},
            "moe": {"images", "adapters"},
            "vision": {"routed experts", "release and resume", "adapters"},
        }[name]
    )
    assert engine.num_requests() == 0


def test_the_command_asks_a_running_engine(trials: Any, models: dict[str, str], capsys: Any) -> None:
    words = ["doctor", "engine", "--model", models["dense"], "--url", trials("dense").engine.url]
    assert main([*words, "--only", "log_probs,stops", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["findings"]
    assert {"log-probs of prompts", "ignore_eos"} <= {finding["what"] for finding in found}
    assert {finding["status"] for finding in found} <= {"ok", "warn"}


def test_the_command_starts_the_engine_of_another_python(models: dict[str, str], capsys: Any) -> None:
    words = ["doctor", "engine", "--model", models["moe"], "--python", sys.executable]
    assert main([*words, "--only", "experts,weights"]) == 0
    shown = capsys.readouterr().out
    assert "routed experts" in shown
    assert "update after resume" in shown


def test_an_engine_that_cannot_start_shows_its_last_lines(models: dict[str, str], capsys: Any) -> None:
    words = ["doctor", "engine", "--model", models["dense"], "--", "--attention-backend", "no_such_backend"]
    assert main(words) == 2
    assert "no_such_backend" in capsys.readouterr().err


class FaultyEngine(ExternalEngine):
    """The engine of a trial, with a defect between it and its callers.

    Attributes:
        before: changes the body of a call. ``DROPPED``: the call is not made, and answered with success.
        after: changes the answer to a call.
    """

    before: Callable[[str, Any], Any] = staticmethod(lambda verb, body: body)
    after: Callable[[str, Any, Any], Any] = staticmethod(lambda verb, body, answer: answer)

    def __init__(self, trial: Trial) -> None:
        (info,) = discover_external_engines([trial.engine.url])
        super().__init__(0, info, 600.0)

    def _request(self, method: str, url: str, body: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        verb = url.removeprefix("/").partition("?")[0]
        changed = self.before(verb, json.loads(json.dumps(body)))
        if changed is DROPPED:
            if version := (body or {}).get("weight_version"):
                self.set_weight_version(version)
            return {}
        return self.after(verb, body, super()._request(method, url, changed, *args, **kwargs))


def without(*verbs: str) -> Callable[[str, Any], Any]:
    """The engine answers ``verbs`` with success and does nothing."""
    return lambda name, body: DROPPED if name in verbs else body


def with_params(is_meant: Callable[[dict[str, Any]], bool], **changes: Any) -> Callable[[str, Any], Any]:
    """Other sampling parameters for the requests with parameters that ``is_meant``."""

    def change(verb: str, body: Any) -> Any:
        if verb == "generate" and is_meant(body["sampling_params"]):
            body["sampling_params"] |= changes
        return body

    return change


def in_answers(change: Callable[[dict[str, Any], Any], None]) -> Callable[[str, Any, Any], Any]:
    """``change(meta_info, request)`` of every answer to a request."""

    def apply(verb: str, body: Any, answer: Any) -> Any:
        if verb == "generate":
            for each in answer.get("list", [answer]):
                change(each["meta_info"], body)
        return answer

    return apply


def drop_from_sets(meta: dict[str, Any], body: Any) -> None:
    """Top-p off by one: the most likely token that was not sampled is missing in every set."""
    sampled = [pair[1] for pair in meta["output_token_logprobs"]]
    for kept, token in zip(meta.get(SAMPLING_MASK) or [], sampled, strict=False):
        if len(kept) > 1:
            kept.remove(next(each for each in kept if each != token))


def add_to_sets(meta: dict[str, Any], body: Any) -> None:
    for kept in meta.get(SAMPLING_MASK) or []:
        kept.append(next(token for token in range(90) if token not in kept))


def swallow_stop(meta: dict[str, Any], body: Any) -> None:
    if (meta["finish_reason"] or {}).get("type") == "stop":
        meta["output_token_logprobs"].pop()


def scaled_prompts(golden: Golden) -> Callable[[dict[str, Any], Any], None]:
    """The prompt's log-probs, as if the logits had been divided by the temperature."""

    def change(meta: dict[str, Any], body: Any) -> None:
        ids = [pair[1] for pair in meta["input_token_logprobs"]]
        scaled = golden.log_probs(ids, temperature=body["sampling_params"]["temperature"]).tolist()
        meta["input_token_logprobs"] = [[None, ids[0]], *zip(scaled, ids[1:], strict=True)]

    return change


def before_penalty(golden: Golden) -> Callable[[dict[str, Any], Any], None]:
    """The log-probs of the logits with the bias, but without the penalty."""

    def change(meta: dict[str, Any], body: Any) -> None:
        pairs, prompt = meta["output_token_logprobs"], body["input_ids"][0]
        ids = [pair[1] for pair in pairs]
        rows = golden.logits(prompt + ids)[len(prompt) - 1 : -1].clone()
        for token, bias in body["sampling_params"]["logit_bias"].items():
            rows[:, int(token)] += bias
        values = rows.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()
        meta["output_token_logprobs"] = [[value, token, None] for value, token in zip(values, ids, strict=True)]

    return change


def of_experts(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[dict[str, Any], Any], None]:
    def apply(meta: dict[str, Any], body: Any) -> None:
        if "routed_experts" in meta:
            rows = np.frombuffer(base64.b64decode(meta["routed_experts"]), "<i4").reshape(-1, 2, 2)
            meta["routed_experts"] = base64.b64encode(np.ascontiguousarray(change(rows)).tobytes()).decode()

    return apply


def one_image(verb: str, body: Any) -> Any:
    if verb == "generate" and "image_data" in body:
        body["image_data"] = [encode_image_for_rollout_engine(Image.new("RGB", (48, 48), (9, 9, 9)))]
    return body


def same_checksums(verb: str, body: Any, answer: Any) -> Any:
    if verb == "weights_checker" and body["action"] == "checksum":
        for rank in answer["ranks"]:
            for name in rank["checksums"]:
                rank["checksums"][name] = "0" * 64
    return answer


# name -> family, check, line, words of it, change of requests or answers
DEFECTS: dict[str, tuple[str, Any, str, str, dict[str, Any]]] = {
    "temperature ignored": (
        *("dense", sampled_log_probs, "at temperature 0.5", "the temperature is ignored"),
        {"before": with_params(lambda params: params["temperature"] > 0, temperature=1.0)},
    ),
    "top-p one short": (
        *("dense", sampling_sets, "top-p 0.8 sets", "a token inside the nucleus is missing"),
        {"after": in_answers(drop_from_sets)},
    ),
    "top-k one more": (
        *("dense", sampling_sets, "top-k 5 sets", "a token outside of the nucleus is in the set"),
        {"after": in_answers(add_to_sets)},
    ),
    "top-p not applied": (
        *("dense", sampled_frequencies, "sampled frequencies", "outside of the nucleus"),
        {"before": with_params(lambda params: params["max_new_tokens"] == 1, top_p=1.0)},
    ),
    "tokens of another temperature": (
        *("dense", sampled_frequencies, "sampled frequencies", "drawn from another distribution"),
        {"before": with_params(lambda params: params["max_new_tokens"] == 1, temperature=0.3)},
    ),
    "stop token swallowed": (
        *("dense", stops, "stop_token_ids", "the stop token is not among the tokens"),
        {"after": in_answers(swallow_stop)},
    ),
    "one token too many": (
        *("dense", stops, "max_new_tokens", "8 tokens for max_new_tokens 7"),
        {"before": with_params(lambda params: params["max_new_tokens"] == 7, max_new_tokens=8)},
    ),
    "ignore_eos not read": (
        *("dense", stops, "ignore_eos", "the end of text must not end the response"),
        {"before": with_params(lambda params: "min_new_tokens" in params, ignore_eos=False)},
    ),
    "stop strings not read": (
        *("dense", stops, "stop strings", "the reason must be a stop at"),
        {"before": with_params(lambda params: "stop" in params, stop=None)},
    ),
    "layers of experts reversed": (
        *("moe", routed_experts, "routed experts", "the layers are in another order"),
        {"after": in_answers(of_experts(lambda rows: rows[:, ::-1]))},
    ),
    "experts of the token before": (
        *("moe", routed_experts, "routed experts", "the rows belong to the neighboring tokens"),
        {"after": in_answers(of_experts(lambda rows: np.roll(rows, 1, axis=0)))},
    ),
    "image ignored": ("vision", images, "images", "the image is ignored", {"before": one_image}),
    "pause does nothing": (
        *("dense", interruptions, "pause (retract)", "a request was answered"),
        {"before": lambda verb, body: DROPPED if body == {"mode": "retract"} else body},
    ),
    "abort does nothing": (
        *("dense", interruptions, "abort", "running requests must end with the reason abort"),
        {"before": without("abort_request")},
    ),
    "no load reported": (
        *("dense", health, "load", "never 1 while a request runs"),
        {"after": lambda verb, body, answer: answer | ({"loads": []} if verb == "v1/loads" else {})},
    ),
    "tensors not loaded": (
        *("moe", weight_updates, "from tensor", "They are those of version"),
        {"before": without("update_weights_from_tensor")},
    ),
    "files not loaded": (
        *("moe", weight_updates, "from disk", "differ from the trainer's"),
        {"before": without("update_weights_from_disk")},
    ),
    "cache not flushed": (
        *("moe", weight_updates, "from distributed", "came from the prefix cache"),
        {"before": without("flush_cache")},
    ),
    "memory kept": (
        *("moe", weight_updates, "release and resume", "no memory is freed"),
        {"before": without("release_memory_occupation", "resume_memory_occupation")},
    ),
    "checksums of nothing": (
        *("moe", weight_updates, "checksums", "0 of"),
        {"after": same_checksums},
    ),
    "adapter not loaded": (
        *("dense", adapters, "adapter from tensors", "the adapter is missing"),
        {"before": without("load_lora_adapter_from_tensors")},
    ),
}


def named(trial: Trial, check: Any, line: str) -> str:
    """The line of a failed check."""
    found = [finding for finding in examine(trial, [check]) if finding.status == "fail"]
    lines = {finding.what: f"{finding.value} {finding.fix}" for finding in found}
    assert line in lines, found
    return lines[line]


@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_named(name: str, trials: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    family, check, line, words, changes = DEFECTS[name]
    trial = trials(family)
    engine = FaultyEngine(trial)
    vars(engine).update(changes)
    if name == "pause does nothing":  # a busy machine needs longer than a second for the answer
        monkeypatch.setattr(engine_verbs, "_PAUSED_S", 600.0)
    try:
        text = named(Trial(engine, trial.golden, trial.server), check, line)
        assert words in text, text
    finally:
        if check in (weight_updates, adapters):
            trial.golden.scale(1.0)
            trial.engine.update_weights_from_disk(trial.golden.checkpoint, "default", flush_cache=True)


def test_an_error_between_two_updates_leaves_the_weights_of_the_checkpoint(trials: Any) -> None:
    trial, engine = trials("moe"), FaultyEngine(trials("moe"))

    def fail_after_reset(verb: str, body: Any) -> Any:
        if verb == "update_weights_from_disk" and not failed:
            failed.append(verb)
            raise RuntimeError("a surprise")
        return body

    failed: list[str] = []
    engine.before = fail_after_reset
    (error,) = (f for f in examine(Trial(engine, trial.golden, trial.server), [weight_updates]) if f.status == "fail")
    assert "a surprise" in error.value
    assert [f.status for f in examine(trial, [prompt_log_probs])] == ["ok"]


@pytest.mark.parametrize(
    ("change", "check", "line", "words"),
    [
        (before_penalty, penalties, "bias and penalty", "from before the penalty"),
        (scaled_prompts, prompt_log_probs, "log-probs of prompts", "scaled by the temperature"),
    ],
)
def test_log_probs_of_other_logits_are_named(change: Any, check: Any, line: str, words: str, trials: Any) -> None:
    trial = trials("dense")
    engine = FaultyEngine(trial)
    engine.after = in_answers(change(trial.golden))
    assert words in named(Trial(engine, trial.golden, trial.server), check, line)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [("rope_theta", 100.0, "positions (rope_theta"), ("rms_norm_eps", 0.5, "a norm, or the precision")],
)
def test_another_configuration_is_named(key: str, value: float, words: str, trials: Any, tmp_path: Path) -> None:
    """The engine computes as another config.json says."""
    trial = trials("dense")
    copy = shutil.copytree(trial.golden.checkpoint, tmp_path / "model")
    config = json.loads((copy / "config.json").read_text())
    config[key] = value
    (copy / "config.json").write_text(json.dumps(config))
    wrong = Trial(trial.engine, Golden(str(copy), context=trial.golden.context), trial.server)
    assert words in named(wrong, prompt_log_probs, "log-probs of prompts")
