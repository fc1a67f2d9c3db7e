"""Drafts from finished responses to the same prompt."""

from __future__ import annotations

import ast
import importlib.util
import random
import shutil
import subprocess
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime.backends.sglang_utils.cpu_platform.drafts import Cursor, History
from slime.backends.sglang_utils.cpu_platform.hooks import add_tokens, keep_drafts, load_at_once, register
from slime.utils import accelerator

PROMPT, OTHER = [7, 8], [8, 7]
CORPUS = Path(__file__).with_name("gpu_corpus.py")


def history_of(*responses: Sequence[int], prompt: Sequence[int] = PROMPT, most_tokens: int = 1000) -> History:
    """The last one is the newest."""
    found = History(most_tokens)
    for response in responses:
        found.add(found.begin(prompt), response)
    return found


def follow(history: History, cursor: Cursor, response: Sequence[int], width: int = 8) -> list[int]:
    """Decode ``response``, whose tokens the model samples. Returns the tokens that each step gains."""
    done, gains = array("q", response[:1]), []
    while len(done) < len(response):
        draft = list(history.draft(cursor, done, min(width - 1, len(response) - len(done) - 1)))
        wanted = list(response[len(done) :])
        accepted = 0
        while accepted < len(draft) and draft[accepted] == wanted[accepted]:
            accepted += 1
        history.note(cursor, len(draft), accepted)
        done.extend(wanted[: accepted + 1])
        gains.append(accepted + 1)
    return gains


def test_a_repeated_response_is_drafted_in_growing_steps() -> None:
    response = list(range(20, 44))
    history = history_of([1, 2, 3], response, [5, 6])
    assert follow(history, history.begin(PROMPT), response) == [3, 5, 8, 7]
    assert follow(history, history.begin(OTHER), response) == [1] * 23


def test_a_draft_continues_after_a_difference() -> None:
    old = list(range(20, 60))
    new = [*old[:10], 3, *old[11:]]
    gains = follow(history := history_of(old), history.begin(PROMPT), new)
    assert sum(gains) == 39
    assert len(gains) < 15


def test_a_long_response_that_resembles_nothing_is_looked_up_a_few_times_only(monkeypatch: pytest.MonkeyPatch) -> None:
    searches = 0
    find = History._find

    def count(history: History, cursor: Cursor, response: array[int]) -> None:
        nonlocal searches
        searches += 1
        find(history, cursor, response)

    monkeypatch.setattr(History, "_find", count)
    history = history_of(list(range(1000)), list(range(500, 1000)), most_tokens=2000)
    cursor = history.begin(PROMPT)
    response = [*range(2000, 3000), *range(500, 900)]
    gains = follow(history, cursor, response)
    assert gains[:999] == [1] * 999
    assert searches < 40
    # and what does resemble one is found later
    assert len(gains) < 999 + 400


def test_the_newest_response_is_drafted() -> None:
    history = history_of([1, 2, 3], [1, 4, 5])
    assert list(history.draft(history.begin(PROMPT), array("q", [1]), 7)) == [4, 5]


def test_a_response_is_remembered_once() -> None:
    history = history_of([1, 2, 3], [1, 4, 5], [1, 2, 3])
    assert history.num_tokens == 6
    assert list(history.draft(history.begin(PROMPT), array("q", [1]), 7)) == [2, 3], "and is the newest again"


def test_a_sequence_whose_drafts_always_fail_gets_no_more() -> None:
    generator = random.Random(0)
    history = history_of([1, *(generator.choice([2, 3]) for _ in range(100))])
    cursor = history.begin(PROMPT)
    drafted = 0
    done = array("q", [1])
    for _ in range(20):
        draft = history.draft(cursor, done, 7)
        drafted += len(draft)
        history.note(cursor, len(draft), 0)
        done.append(1)
    assert 0 < drafted <= 6


def test_the_oldest_prompts_are_forgotten_when_memory_is_full() -> None:
    history = history_of([1, 2, 3, 4], most_tokens=10)
    history.add(history.begin(OTHER), [1, 2, 3, 4])
    history.add(history.begin([9]), [1, 2, 3, 4])
    drafts = [list(history.draft(history.begin(prompt), array("q", [1]), 7)) for prompt in (PROMPT, OTHER, [9])]
    assert drafts == [[], [2, 3], [2, 3]]
    assert history.num_tokens == 8


def test_a_prompt_keeps_its_newest_responses() -> None:
    history = history_of(*([number, number + 1] for number in range(40)))
    assert history.num_tokens == 64
    assert not history.draft(history.begin(PROMPT), array("q", [2]), 7)
    assert list(history.draft(history.begin(PROMPT), array("q", [39]), 7)) == [40]


# In a process of its own: the n-grams have a thread, and their destructor waits for ever in a forked child.
FLUSH = """
from types import SimpleNamespace
from sglang.srt.speculative.cpp_ngram.ngram_corpus import NgramCorpus
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from slime.backends.sglang_utils.cpu_platform.hooks import keep_drafts

for is_deterministic in (False, True):
    corpus = NgramCorpus(max_trie_depth=12, draft_token_num=4, capacity=100)
    corpus.batch_put([[1, 2, 3, 4, 5]])
    for first in range(100, 160):  # more than it has room for
        corpus.batch_put([[first + n for n in range(0, 500, 100)]])
    corpus.synchronize()
    worker = SimpleNamespace(clear_cache_pool=corpus.reset)  # as NGRAMWorker, which needs CUDA to be imported
    args = SimpleNamespace(enable_deterministic_inference=is_deterministic)
    keep_drafts(SimpleNamespace(draft_worker=worker, spec_algorithm=SpeculativeAlgorithm.NGRAM, server_args=args))
    worker.clear_cache_pool()
    for name, text in {"newest": [159, 259], "oldest": [1, 2]}.items():
        print(name, *corpus.batch_get([name], [text], [2])[0])
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="SGLang compiles its n-grams with g++")
def test_an_engine_on_a_gpu_keeps_its_newest_drafts_at_a_weight_sync_and_none_if_it_is_deterministic() -> None:
    """With SGLang's n-grams, which run on a CPU. Without the hook a flush forgets them."""
    found = subprocess.run([sys.executable, "-c", FLUSH], capture_output=True, text=True)
    kept, none = ["newest 259 359 459 559", "oldest 2 0 0 0"], ["newest 259 0 0 0", "oldest 2 0 0 0"]
    assert found.stdout.splitlines()[-4:] == [*kept, *none], found.stderr


@pytest.mark.skipif(shutil.which("g++") is None, reason="SGLang compiles its n-grams with g++")
def test_all_ranks_of_an_engine_on_a_gpu_draft_from_earlier_responses_in_the_next_step() -> None:
    found = subprocess.run([sys.executable, CORPUS], capture_output=True, text=True)
    lines = found.stdout.splitlines()[-9:]
    assert lines[0] == "SGLang's", found.stderr
    assert lines[1].startswith("False 0 --sglang-speculative-ngram-external-sam-budget is 0, so no draft is taken")
    assert lines[2] == "False 0 with deterministic inference the tokens of a seed depend on the drafts"
    assert lines[3:5] == ["draft 10 11 12 13 0 0"] * 2
    assert lines[5] == "True 1991 Loaded corpus 'slime' with 1991 tokens."
    assert lines[-1].startswith("False 0 External corpus 'slime' already exists")


def test_the_hooks_of_a_gpu_fit_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    monkeypatch.setattr(HookRegistry, "_hooks", type(HookRegistry._hooks)(list))
    monkeypatch.setattr(accelerator, "current", lambda: SimpleNamespace(is_cpu=False))
    register()
    targets = {hook: target for target, [(_, hook, _)] in HookRegistry._hooks.items()}
    assert set(targets) == {keep_drafts, add_tokens, load_at_once}
    assert "self.draft_worker.clear_cache_pool()" in _source(targets[keep_drafts])
    assert "self.add_external_corpus_communicator(obj)" in _source(targets[add_tokens])
    assert "self._pending_load = (recv_req, thread)" in _source(targets[load_at_once])


def _source(target: str) -> str:
    """Source of ``module.Class.method``, without importing the module, which takes seconds."""
    module, owner, method = target.rsplit(".", 2)
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    text = Path(spec.origin).read_text("utf-8")
    [found] = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == owner]
    return next(
        ast.unparse(node)
        for node in found.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == method
    )
