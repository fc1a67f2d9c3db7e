"""Functions that a rank runs in ``test_scorer``: score requests as ranks of the log-prob server, change weights."""

from __future__ import annotations

from typing import Any

from slime.backends.megatron_utils.server.queue import RoundSettings, Score, ScoreRequest, plan_round
from slime.backends.megatron_utils.server.scorer import MegatronScorer
from slime.ray.logprob_server import parse_server_args
from slime.utils.errors import ConfigError


def score(
    rank: int, world_size: int, flags: list[str], requests: list[dict[str, Any]], bins: int, then: str
) -> dict[str, Any]:
    """Score ``requests`` in rounds of at most 40 tokens and ``bins`` micro-batches a rank, then with other weights.

    Returns:
        before, after: answers by position of their request, on the rank that has them.
        refused: the error for a missing path.
    """
    args = parse_server_args([*flags, "--actor-num-gpus-per-node", str(world_size)])
    scorer = MegatronScorer(args, rank=rank, world_size=world_size)
    scorer.setup()
    asked = [ScoreRequest(**request) for request in requests]
    before = _all(scorer, asked, bins)
    try:
        scorer.load("/nowhere")
    except ConfigError as error:
        refused = str(error)
    unchanged = _all(scorer, asked, bins)
    scorer.load(then)
    return {"before": before, "unchanged": unchanged, "after": _all(scorer, asked, bins), "refused": refused}


def _all(scorer: MegatronScorer, requests: list[ScoreRequest], bins: int) -> dict[int, Score]:
    dp_rank, dp_size = scorer.data_parallel
    found: dict[int, Score] = {}
    first = 0
    while first < len(requests):
        plan = plan_round(
            [len(request.input_ids) for request in requests[first:]],
            RoundSettings(max_tokens=40, data_parallel_size=dp_size, num_micro_batches=bins),
        )
        places = [[first + position for position in part] for part in plan.ranks[dp_rank]]
        answers = scorer.score([[requests[place] for place in part] for part in places])
        for part, scores in zip(places, answers or [[] for _ in places], strict=True):
            found |= dict(zip(part, scores, strict=answers is not None))
        first += plan.num_taken
    return found
