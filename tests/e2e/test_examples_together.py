"""The functions of several examples in one run on the real stack: a sample's metadata names the example that plays it.

A warm start on the demonstrations of all of them gives the model that calls their tools.
"""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch
import yaml

from examples.agent_tool import run_tiny as agent
from examples.coding_agent_rl import run_tiny as coding
from examples.strands_sglang import run_tiny as strands
from examples.tiny.recipe import ROWS_PER_ROLLOUT, warm_start, write_rows
from examples.tiny.tools import NAMES, make_tool_model
from slime.weight_sync.version_store import read_manifest
from tests.e2e.running import metrics, run_train, values

tau = importlib.import_module("examples.tau-bench.run_tiny")
shop = importlib.import_module(tau.SHOP)
GENERATE = {
    "agent_tool": "examples.agent_tool.generate_with_agent.generate",
    "coding_agent_rl": "examples.coding_agent_rl.generate.generate",
    "tau-bench": "examples.tau-bench.generate_with_tau.generate",
    "strands_sglang": "examples.strands_sglang.generate_with_strands.generate",
}
USED = {
    "agent_tool": "mint?",
    "coding_agent_rl": "tool\nsaved",
    "tau-bench": "tool\nok",
    "strands_sglang": "<function=calculator>",
}
"""Example -> text of a response with a second turn: a tool was called, or the program asked again."""
TWO_TURNS = """
import os, sys, httpx
url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
messages = [{"role": "user", "content": sys.argv[-1]}]
with httpx.Client(headers={"Authorization": "Bearer " + key}, timeout=600, trust_env=False, verify=False) as client:
    for _ in range(2):
        reply = client.post(url + "/chat/completions", json={"messages": messages})
        reply.raise_for_status()
        message = reply.json()["choices"][0]["message"]
        messages += [message, {"role": "user", "content": "mint?"}]
print(message["content"])
"""
DISPATCH = """
from slime.hooks import load_function
from slime.rollout.custom_generate import GenerateFunction

PATHS = {paths!r}


async def generate(args, sample, sampling_params, evaluation=False):
    function = load_function(PATHS[sample.metadata["example"]], "generate")
    return await GenerateFunction(args, function).of_one(sample, sampling_params, evaluation)
"""


def mixed_demonstrations(count: int) -> Iterator[dict]:
    """Conversations in which a tool is called: so few steps do not teach when to call one."""
    sources = [
        (row for row in module.demonstrations(5 * count) if len(row["metadata"]["segments"]) > 1)
        for module in (coding, tau, strands)
    ]
    for rows in islice(zip(*sources, strict=False), count // 3 + 1):
        yield from rows


def rows_of_all(output: Path) -> Iterator[dict]:
    draw = random.Random(3)
    task = {"image": coding.make_repository(output / "repository"), "workdir": ".", "eval_cmd": "python3 -S test.py"}
    yield {"prompt": agent.question("amber"), "label": "47", "metadata": {"example": "agent_tool"}}
    for index in range(4):
        number, a, b = draw.randrange(10, 100), draw.randint(32, 99), draw.randint(32, 99)
        test = {"test.py": f"from answer import answer\nassert answer == {number}\n"}
        edit = task | {"eval_files": test, "example": "coding_agent_rl"}
        yield {"prompt": coding.question(number), "label": "", "metadata": edit}
        yield {"prompt": str(index), "label": NAMES[index], "metadata": {"example": "tau-bench"}}
        yield {"prompt": strands.question(a, b), "label": str(a * b), "metadata": {"example": "strands_sglang"}}


def settings_of_all() -> dict:
    program = {"agent_command": [sys.executable, "-c", TWO_TURNS], "agent_processes": 4, "agent_max_turns": 2}
    others = {"agent_timeout": 60.0, "strands_agent": "plain", "tau_env": tau.SHOP}
    return program | coding.SETTINGS | strands.SETTINGS | others


@pytest.mark.slow
def test_agents_play_users_and_tools_and_train_on_their_exact_tokens_with_weights_sent_as_differences(tmp_path):
    words = {*agent.WORDS, *coding.WORDS, *tau.WORDS, *strands.WORDS}
    rows = list(islice(mixed_demonstrations(3 * ROWS_PER_ROLLOUT), 3 * ROWS_PER_ROLLOUT))
    model = warm_start(make_tool_model(tmp_path, sorted(words)), rows, tmp_path, rollouts=3)
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(settings_of_all()))
    (tmp_path / "dispatch.py").write_text(DISPATCH.format(paths=GENERATE))
    flags = [
        *("--hf-checkpoint", model, "--prompt-data", write_rows(tmp_path / "train.jsonl", rows_of_all(tmp_path))),
        *("--label-key", "label", "--num-rollout", 2, "--rollout-batch-size", 13, "--n-samples-per-prompt", 4),
        *("--custom-generate-function-path", tmp_path / "dispatch.py", "--custom-config-path"),
        *(tmp_path / "settings.yaml", "--metadata-key", "metadata", "--max-turns", 6),
        *("--rollout-max-response-len", 64, "--rollout-num-gpus", 1, "--actor-num-gpus-per-node", 1, "--fp32"),
        *("--rollout-top-p", 0.9),  # log-probs are those of a cut vocabulary
        *("--sglang-context-length", 256, "--sglang-max-total-tokens", 32768, "--lr", "1e-4"),
        *("--update-weight-mode", "delta", "--update-weight-transport", "disk", "--update-weight-disk-keep-files"),
        *("--update-weight-disk-dir", tmp_path / "shared", "--update-weight-local-checkpoint-dir", tmp_path / "local"),
        *("--save-debug-rollout-data", tmp_path / "{rollout_id}.pt", "--output-dir", tmp_path),
        *("--experiment-name", "run"),
    ]
    finished = run_train(flags, tmp_path)
    assert finished.status == 0, finished.output[-4000:]
    assert finished.survivors() == []
    assert max(values(metrics(tmp_path / "run"), "train/train_rollout_logprob_abs_diff")) < 1e-4
    samples = [
        sample for index in range(2) for sample in torch.load(tmp_path / f"{index}.pt", weights_only=True)["samples"]
    ]
    for name, tag in USED.items():
        own = [sample for sample in samples if sample["metadata"]["example"] == name]
        used = [sample for sample in own if tag in sample["response"]]
        assert used, f"{name}: no tool was called in {[sample['response'] for sample in own][:4]}"
        assert all(0 in sample["loss_mask"] and 1 in sample["loss_mask"] for sample in used)
    executed = [sample for sample in samples if sample["metadata"]["example"] == "agent_tool"]
    assert {sample["rollout_id"] for sample in executed} == {sample["index"] for sample in executed}
    versions = [read_manifest(tmp_path / "shared" / f"weight_v{number:06}") for number in range(3)]
    assert [version.is_delta for version in versions] == [False, True, True]
