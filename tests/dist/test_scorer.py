"""The log-prob server's ranks say what transformers says, however the model is divided among them."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from slime.backends.megatron_utils.server.queue import Score
from tests.dist.ranks import ForkServer
from tests.unit.megatron_utils.tiny_trainer import make_hf_model
from tests.verification import verify

TEMPERATURE = 0.7
VOCAB = 500
LENGTHS = [5, 33, 2, 18, 50]
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one rank": (1, []),
    "data": (2, []),
    "tensor": (2, ["--tensor-model-parallel-size", "2", "--sequence-parallel"]),
    "context": (2, ["--context-parallel-size", "2"]),
    "pipeline": (2, ["--pipeline-model-parallel-size", "2"]),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two directories. The second model has the same shape and other weights."""
    paths = [tmp_path_factory.mktemp("scorer"), tmp_path_factory.mktemp("scorer")]
    model = make_hf_model("qwen3", paths[0], vocab_size=VOCAB)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.7)
    model.save_pretrained(paths[1])
    return [str(path) for path in paths]


def requests() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(3)

    def ids(*shape: int) -> list[Any]:
        return torch.randint(0, VOCAB, shape, generator=generator).tolist()

    asked: list[dict[str, Any]] = [{"input_ids": ids(length)} for length in LENGTHS]
    asked[1] |= {"label_token_ids": ids(32, 3), "sample_n": 400}
    asked[2] |= {"label_token_ids": ids(1, 5)}
    asked[4] |= {"sample_n": 2}
    return asked


@cache
def expected(path: str) -> list[torch.Tensor]:
    """``[len - 1, V]`` log-softmax of each request."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        logits = [model(torch.tensor([one["input_ids"]])).logits[0, :-1] for one in requests()]
    return [(rows / TEMPERATURE).log_softmax(-1) for rows in logits]


def check(answer: Score, asked: dict[str, Any], rows: torch.Tensor) -> None:
    tokens = torch.tensor(asked["input_ids"][1:])
    close("log-probs", answer.log_probs, rows.gather(1, tokens[:, None])[:, 0])
    if labels := asked.get("label_token_ids"):
        close("labels", answer.label_token_log_probs, rows.gather(1, torch.tensor(labels)))
    else:
        assert answer.label_token_log_probs is None
    if asked.get("sample_n"):
        drawn = torch.tensor(answer.sampled_token_ids)
        assert drawn.shape == (len(tokens), asked["sample_n"])
        close("samples", answer.sampled_log_probs, rows.gather(1, drawn))
    else:
        assert answer.sampled_token_ids is None


def close(what: str, found: Any, wanted: torch.Tensor) -> None:
    verify(f"{what} of the log-prob server", "transformers", torch.tensor(found), wanted, tolerance=1e-5)


def check_frequencies(drawn: torch.Tensor, rows: torch.Tensor) -> None:
    """32 x 400 draws: their mean log-prob and the share of the upper half of the ids are those of the distribution."""
    probs = rows.exp()
    entropy = -(probs * rows).sum(-1).mean()
    assert abs(-rows.gather(1, drawn).mean() - entropy) < 0.02
    upper = probs[:, VOCAB // 2 :].sum(-1).mean()
    assert abs((drawn >= VOCAB // 2).float().mean() - upper) < 0.02


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_are_those_of_transformers_and_follow_the_weights(
    ranks: ForkServer, models: list[str], layout: str
) -> None:
    world_size, flags = LAYOUTS[layout]
    first, second = models
    words = ["--hf-checkpoint", first, "--rollout-temperature", str(TEMPERATURE), "--fp32", *flags]
    results = ranks.run(
        "tests.dist.scorer_cases:score", world_size, flags=words, requests=requests(), bins=2, then=second
    )
    assert all("model_path /nowhere does not exist" in result["refused"] for result in results)
    for key, path in (("before", first), ("unchanged", first), ("after", second)):
        answers: dict[int, Score] = {}
        for result in results:
            assert not answers.keys() & result[key].keys(), "two ranks answer the same request"
            answers |= result[key]
        assert sorted(answers) == list(range(len(LENGTHS)))
        for position, asked in enumerate(requests()):
            check(answers[position], asked, expected(path)[position])
        check_frequencies(torch.tensor(answers[1].sampled_token_ids), expected(path)[1])
