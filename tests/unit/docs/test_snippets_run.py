"""Python code of the pages runs, and every flag that names a function has a snippet that keeps its contract."""

from __future__ import annotations

import asyncio
import re
import textwrap
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

import slime
from slime.api import command_line
from slime.data.processing import load_tokenizer
from slime.data.sample import Sample
from slime.doctor.environment_play import Script, play
from slime.environments import load
from slime.hooks.protocols import HOOKS
from slime.ray import arguments
from slime.ray.arguments import parse_only
from slime.ray.run import cluster, start
from slime.ray.run.loop import Run
from slime.testing import check_plugin
from tests.doc_commands import PAGES, ROOT, blocks
from tests.unit.rollout.fake_engine import FakeEngine
from tools.make_tiny_task import TinyTask

OF_HOOKS = "docs/en/get_started/customization.md"
SECTION = re.compile(r"^### `(--[a-z-]+)`\n(.*?)(?=^#)", re.MULTILINE | re.DOTALL)
SNIPPET = re.compile(r"```python\n(.*?)```", re.DOTALL)


def snippets_of_hooks() -> list[tuple[str, str]]:
    """(flag, code) of the page about hooks."""
    sections = SECTION.findall((ROOT / OF_HOOKS).read_text(encoding="utf-8") + "\n#")
    return [(flag, code) for flag, body in sections for code in SNIPPET.findall(body)]


@pytest.mark.parametrize(("flag", "code"), snippets_of_hooks(), ids=lambda value: value.split("\n")[0][:40])
def test_a_snippet_keeps_the_contract_of_its_flag(flag: str, code: str, tmp_path: Path) -> None:
    file = tmp_path / "snippet.py"
    file.write_text(code)
    name = re.findall(r"^(?:async def|def|class) (\w+)", code, re.MULTILINE)[-1]
    assert check_plugin(flag, f"{file}:{name}") == []


def test_every_flag_that_names_a_function_has_a_snippet() -> None:
    assert {hook.flag for hook in HOOKS} - {flag for flag, _ in snippets_of_hooks()} == set()


def snippet(page: str, words: str) -> str:
    [code] = [code for code in blocks(ROOT / page, "python") if words in code]
    return code


def names_of(page: str, words: str, **given: Any) -> dict[str, Any]:
    """The names that the snippet defines, with ``given`` names in its scope."""
    scope = dict(given)
    exec(snippet(page, words), scope)
    return scope


def run_inside(code: str, **given: Any) -> dict[str, Any]:
    """The names of a snippet that awaits at its top level."""
    body = f"async def whole():\n{textwrap.indent(code, '    ')}\n    return locals()\n"
    scope = dict(given)
    exec(body, scope)
    return asyncio.run(scope["whole"]())


@pytest.mark.parametrize(
    ("page", "words", "flag", "name"),
    [
        ("docs/en/get_started/quick_start.md", "def reward_func", "--custom-rm-path", "reward_func"),
        (OF_HOOKS, "MOST_CALLS", "--custom-generate-function-path", "generate_with_calculator"),
        ("docs/algorithms/custom.md", "policy_loss_function", "--custom-loss-function-path", "loss"),
    ],
)
def test_a_function_of_a_page_keeps_the_contract_of_its_flag(
    page: str, words: str, flag: str, name: str, tmp_path: Path
) -> None:
    file = tmp_path / "snippet.py"
    file.write_text(snippet(page, words))
    assert check_plugin(flag, f"{file}:{name}") == []


def test_a_reward_that_asks_another_model_sums_its_log_probs() -> None:
    def answer(payload: dict[str, Any], number: int) -> tuple[int, Any]:
        assert payload["input_ids"] == [5, 6, 7]
        return 200, {"meta_info": {"input_token_logprobs": [[None, 5, None], [-1.0, 6, None], [-0.5, 7, None]]}}

    engine = FakeEngine(answer)
    reward = names_of("docs/engines.md", "get_model_url")["reward"]
    args = Namespace(sglang_model_routers={"ref": ("127.0.0.1", engine.port)})
    assert asyncio.run(reward(args, Sample(tokens=[5, 6, 7]))) == -1.5
    engine.close()


def test_spans_of_a_function_are_in_the_sample_s_trace() -> None:
    async def search(query: str) -> list[str]:
        return [query]

    made = names_of("docs/observability.md", "trace_span", search=search)
    sample = asyncio.run(made["generate"](None, Sample(), {}))
    assert asyncio.run(made["reward"](None, sample)) == 1.0
    trace = repr(sample.trace)
    for word in ("search", "capital of France", "num_hits", "answered", "grade"):
        assert word in trace


def test_the_test_of_a_reward_passes_for_one_that_keeps_its_contract(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_pkg").mkdir()
    (tmp_path / "my_pkg" / "rewards.py").write_text("def score(args, sample, **kwargs):\n    return {'score': 1.0}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    made = names_of(OF_HOOKS, "def test_the_reward")
    made["test_the_reward_keeps_its_contract"]()


def test_an_adapter_serves_a_session_and_gives_its_samples(tiny_task: TinyTask) -> None:
    code = snippet("docs/agents.md", "OpenAIAdapter(")
    args = Namespace(rollout_max_context_len=None)
    given = {
        "args": args,
        "sid": "s",
        "sampling_params": {"temperature": 1.0},
        "sample": Sample(index=3),
        "reward": 0.5,
    }
    made = run_inside(code, tokenizer=load_tokenizer(tiny_task.model), **given)
    assert made["server"].port > 0
    assert made["samples"] == [], "no program used it"
    made["server"].stop()


def test_a_harness_runs_its_program_in_a_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[str] = []
    for name in ("SLIME_AGENT_NODE_TARBALL", "SLIME_AGENT_CC_TARBALL"):
        (tmp_path / f"{name}.tar").write_bytes(b"")
        monkeypatch.setenv(name, str(tmp_path / f"{name}.tar"))

    class Sandbox:
        sandbox_id = "fake"

        def __init__(self, image: str) -> None:
            assert image == "image"

        async def __aenter__(self) -> Sandbox:
            return self

        async def __aexit__(self, *error: object) -> None: ...

        async def exec(self, cmd: str, **options: Any) -> tuple[int, str, str]:
            commands.append(cmd)
            return 0, "0\n" if "test -f" in cmd else "", ""

        async def write_file(self, path: str, content: Any, **options: Any) -> None: ...

    monkeypatch.setattr("slime.agent.sandbox.E2BSandbox", Sandbox)
    made = run_inside(snippet("docs/agents.md", "ClaudeCodeHarness"), image="image", sid="s", url="http://a:1")
    assert made["code"] == 0
    assert any("setsid" in cmd for cmd in commands)


def test_an_environment_is_a_class_with_three_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_sums.py").write_text(snippet("docs/environments.md", "class Sums"))
    monkeypatch.syspath_prepend(str(tmp_path))
    environment = load("my_sums:Sums")
    task = environment.task(3)
    replies = (task.answer, "no number")
    played = [asyncio.run(play(environment, task, Script([reply]), timeout_s=60.0)) for reply in replies]
    assert [one.reward for one in played] == [1.0, 0.0]


def test_every_python_block_of_a_page_runs() -> None:
    here = Path(__file__).read_text()
    pages = {str(page.relative_to(ROOT)): len(blocks(page, "python")) for page in PAGES}
    others = {page: number for page, number in pages.items() if number and page != OF_HOOKS}
    assert {page: here.count(f'"{page}", "') for page in others} == others


def test_python_starts_a_run_by_keywords(monkeypatch: pytest.MonkeyPatch) -> None:
    record, flags = MagicMock(), {}
    # slime.train has no value in the package before its first use.
    monkeypatch.setitem(vars(slime), "train", lambda **given: flags.update(given) or record)
    names = names_of("docs/en/get_started/usage.md", "import slime\n")
    assert {"--num-rollout=10", "--experiment-name=sums"} < set(command_line(flags))
    assert names["rewards"] is record.metrics["rollout/raw_reward"].dropna()
    record.samples.nsmallest.assert_called_once_with(5, "reward")


def test_the_loop_of_a_notebook_calls_the_steps_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    run, parsed = MagicMock(start_rollout_id=0, rollout_ids=range(2)), []
    run.__enter__.return_value = run
    monkeypatch.setattr(arguments, "parse_args", lambda argv: parsed.extend(argv))
    monkeypatch.setattr(cluster, "running_cluster", lambda args: nullcontext())
    monkeypatch.setattr(start, "start_run", lambda args: run)
    names_of("docs/en/get_started/usage.md", "with running_cluster(args), start_run(args)")
    args, _ = parse_only(parsed)
    assert args is not None
    assert args.num_rollout == 10
    verbs = [name for name, *_ in run.method_calls]
    assert verbs == ["sync_weights", *["generate", "train", "sync_weights", "report"] * 2]
    assert all(hasattr(Run, name) for name in verbs)
