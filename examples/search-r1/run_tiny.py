"""Search-R1 on one machine without a GPU, in about a minute: a tiny model learns to look up unknown facts.

    python examples/search-r1/run_tiny.py --output outputs/search-r1

1. A corpus of invented facts ("code of amber is 47."), questions about them, and a random model.
2. A supervised warm start from a teacher who looks up four times in ten and guesses otherwise.
3. GRPO with the local search server, rewarded for right answers: the model stops guessing.
"""

from __future__ import annotations

import importlib
import random
import sys
import threading
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.tiny.recipe import (
    ROWS_PER_ROLLOUT,
    learn,
    make_model,
    options,
    print_first_and_last,
    warm_start,
    write_rows,
)

search_server = importlib.import_module("examples.search-r1.local_search_server")  # no name for an import statement

NAMES = (
    *("amber", "basil", "cedar", "dahlia", "ebony", "fennel", "ginger", "hazel", "indigo", "jasmine", "kelp", "laurel"),
    *(
        "maple",
        "nettle",
        "olive",
        "pepper",
        "quince",
        "rose",
        "saffron",
        "thyme",
        "umber",
        "violet",
        "willow",
        "zinnia",
    ),
)
TAGS = ("<search>", "</search>", "<information>", "</information>", "<answer>", "</answer>")
WORDS = (*TAGS, *NAMES, "code", "of", "is", "doc")
SHARE_OF_LOOKING_UP = 0.4


def facts(seed: int = 0) -> dict[str, str]:
    draw = random.Random(seed)
    return {name: str(draw.randrange(10, 100)) for name in NAMES}


def question(name: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"code of {name}?"}]


def demonstrations(count: int) -> list[dict[str, Any]]:
    """Invented codes, so that the model learns to read them off and not to know them."""
    draw = random.Random(1)
    rows = []
    for _ in range(count):
        name, code, guess = draw.choice(NAMES), draw.randrange(10, 100), draw.randrange(10, 100)
        if draw.random() < SHARE_OF_LOOKING_UP:
            found = f"<information>doc 1: code of {name} is {code}.</information>"
            segments = [[f"<search>code of {name}</search>", 1], [found, 0], [f"<answer>{code}</answer>", 1]]
        else:
            segments = [[f"<answer>{guess}</answer>", 1]]
        rows.append({"prompt": question(name), "metadata": {"segments": segments}})
    return rows


def main() -> None:
    output = options(__doc__, "search-r1").output
    codes = facts()
    corpus = write_rows(
        output / "corpus.jsonl", ({"contents": f"code of {name} is {code}."} for name, code in codes.items())
    )
    data = write_rows(
        output / "train.jsonl", ({"prompt": question(name), "label": code} for name, code in codes.items())
    )
    model = warm_start(make_model(output, WORDS), demonstrations(4 * ROWS_PER_ROLLOUT), output, rollouts=4)

    # Port 0 takes a free one, which the settings below get.
    server = search_server.make_server(search_server.Bm25(search_server.read_corpus(Path(corpus))), "127.0.0.1", 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    settings = yaml.safe_load((Path(__file__).parent / "search.yaml").read_text(encoding="utf-8"))
    settings |= {"search_url": f"http://127.0.0.1:{server.server_address[1]}/retrieve", "search_topk": 1}
    (output / "search.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    flags = [
        *("--apply-chat-template", "--rollout-max-response-len", 48),
        *("--max-turns", 2, "--custom-config-path", output / "search.yaml"),
        *("--custom-generate-function-path", "examples.search-r1.generate_with_search.generate"),
        *("--custom-rm-path", "examples.search-r1.generate_with_search.reward_func", "--reward-key", "score"),
    ]
    try:
        records = learn("GRPO with a search server", model, data, flags, output, rollouts=10)
    finally:
        server.shutdown()
    print_first_and_last("reward of a response", records)


if __name__ == "__main__":
    main()
