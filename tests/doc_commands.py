"""The documented commands, the test that executes each of them, and the model that they name.

:func:`census` puts every command of a ``bash`` block into exactly one class. Tests of the documentation, of the
examples and of whole runs take commands from here, so that tests execute the commands that a reader sees.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

__all__ = [
    "PAGES",
    "QWEN3_4B",
    "ROOT",
    "RUNS",
    "Command",
    "Executed",
    "bash_blocks",
    "blocks",
    "census",
    "commands",
    "commands_of_page",
    "make_model",
    "shown_flags",
]

ROOT = Path(__file__).parents[1]
GENERATED = ("flags.md", "metrics.md")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "scripts" / "README.md"]
PAGES += [page for page in sorted((ROOT / "docs").rglob("*.md")) if page.name not in GENERATED]
PAGES += sorted((ROOT / "examples").rglob("README.md"))

QWEN3_4B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}

_MARK = re.compile(r"# needs (a GPU|a cluster|Docker|the network)\b")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"\s+#\s.*$")

Executed: TypeAlias = Literal["here", "up to training", "by a run", "marked"]
"""The test that executes a command: those of the documentation, the same with checks in place of the start of training,
a test of whole runs (:data:`RUNS`), or none, because the command needs the requirement on the page."""

RUNS: dict[tuple[str, str], str] = {
    ("README.md", "make test"): ".ci/run",
    ("README.md", "--rm-type math"): "tests/e2e/test_loop.py",
    ("README.md", "slime new my_task"): "tests/e2e/test_new_task.py",
    ("README.md", "bash my_task/run.sh"): "tests/e2e/test_new_task.py",
    ("docs/algorithms/lora.md", "--lora-rank"): "tests/e2e/test_loop_lora.py",
    ("docs/cluster.md", "--rollout-data-transport"): "tests/e2e/test_data_transport.py",
    ("docs/colocate.md", "--colocate"): "tests/e2e/test_colocate.py",
    ("docs/data.md", "--rollout-buffer-url"): "tests/e2e/test_shown_commands.py",
    ("docs/data.md", "rollout_buffer.buffer"): "tests/e2e/test_shown_commands.py",
    ("docs/debugging.md", "slime replay"): "tests/e2e/test_run_record.py",
    ("docs/engines.md", "launch_server --model-path MODEL --host"): "tests/e2e/test_external_engines.py",
    ("docs/engines.md", "--rollout-external-engine-addrs"): "tests/e2e/test_external_engines.py",
    ("docs/environments.md", "counting_server.py"): "tests/e2e/test_environments.py",
    ("docs/environments.md", "doctor env openenv:http"): "tests/unit/environments/test_openenv.py",
    ("docs/environments.md", "tasks openenv:http"): "tests/unit/environments/test_openenv.py",
    ("docs/environments.md", "doctor env nemo-gym"): "tests/unit/environments/test_nemo_gym.py",
    ("docs/environments.md", "tasks nemo-gym"): "tests/unit/environments/test_nemo_gym.py",
    ("docs/engines.md", "slime doctor engine --model MODEL --python"): "tests/e2e/test_engine_doctor.py",
    ("docs/engines.md", "slime doctor engine --model MODEL --url"): "tests/e2e/test_engine_doctor.py",
    ("docs/evaluation.md", "--eval-interval"): "tests/e2e/test_loop.py",
    ("docs/fsdp.md", "--train-backend fsdp"): "tests/e2e/test_loop_fsdp.py",
    ("docs/logprob_server.md", "megatron_server"): "tests/e2e/test_logprob_server.py",
    ("docs/logprob_server.md", "curl"): "tests/e2e/test_logprob_server.py",
    ("docs/logprob_server.md", "--use-opd"): "tests/e2e/test_logprob_server.py",
    ("docs/en/get_started/quick_start.md", "--debug-rollout-only"): "tests/e2e/test_router.py",
    ("docs/en/get_started/quick_start.md", "train.py --hf-checkpoint MODEL"): "tests/e2e/test_loop_ppo.py",
    ("docs/en/get_started/quick_start.md", "slime new my_task"): "tests/e2e/test_new_task.py",
    ("docs/en/get_started/quick_start.md", "bash my_task/run.sh"): "tests/e2e/test_new_task.py",
    ("README.md", "make demo"): "tests/e2e/test_shown_commands.py",
    ("docs/en/get_started/quick_start.md", "make demo"): "tests/e2e/test_shown_commands.py",
    ("examples/demo/README.md", "run_demo.py"): "tests/e2e/test_shown_commands.py",
    ("docs/reproducibility.md", "--ci-test"): "tests/e2e/test_logprob_server.py",
    ("docs/reproducibility.md", "--ci-save-grad-norm"): "tests/e2e/test_loop.py",
    ("docs/reproducibility.md", "--ci-load-grad-norm"): "tests/e2e/test_loop.py",
    ("docs/reproducibility.md", "--deterministic-mode"): "tests/e2e/test_chaos.py",
    ("docs/reliability.md", "simulate.py --seeds"): "tests/unit/simulation/test_schedules.py",
    ("docs/reliability.md", "simulate.py --kills"): "tests/unit/simulation/test_schedules.py",
    ("docs/reproducibility.md", "slime replay"): "tests/e2e/test_history.py",
    ("docs/reproducibility.md", "slime branch"): "tests/e2e/test_history.py",
    ("docs/en/get_started/usage.md", "--advantage-estimator ppo"): "tests/e2e/test_loop_ppo.py",
}
"""(page, words of the command) -> the file that runs it, smaller."""

UP_TO_TRAINING = re.compile(r"python (examples/[\w-]+/run_tiny|benchmarks/algorithm_curves)\.py")


@dataclass(frozen=True)
class Command:
    """One command of a page.

    Attributes:
        page: relative to the root of the repository.
        block: which of the page's ``bash`` blocks.
        text: continued lines joined, without comments.
        needs: the requirement on the page, such as "a GPU", else empty.
    """

    page: str
    block: int
    text: str
    needs: str = ""


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of ``language`` on a page."""
    return [body for name, body in _FENCE.findall(page.read_text(encoding="utf-8")) if name == language]


def bash_blocks(page: Path) -> list[str]:
    return blocks(page, "bash")


def commands(block: str) -> list[str]:
    """Its lines, continued ones joined, without comments."""
    return [command.text for command in _commands("", 0, block)]


def commands_of_page(page: Path) -> list[Command]:
    name = str(page.relative_to(ROOT))
    return [command for index, block in enumerate(bash_blocks(page)) for command in _commands(name, index, block)]


def _commands(page: str, index: int, block: str) -> list[Command]:
    """A mark in the first line is about the whole block, one at the end of a command about this command."""
    of_block = _MARK.match(block)
    found = []
    for line in block.replace("\\\n", " ").splitlines():
        text = _COMMENT.sub("", line).strip()
        if text and not line.startswith("#"):
            mark = _MARK.search(line) or of_block
            found.append(Command(page, index, re.sub(r"\s+", " ", text), mark[1] if mark else ""))
    return found


def census() -> dict[Command, Executed]:
    """Every command of every page.

    Raises:
        AssertionError: a command is executed by a run and marked, or an entry of :data:`RUNS` is about no command.
    """
    classes: dict[Command, Executed] = {}
    runs = {key: [] for key in RUNS}
    for page in PAGES:
        for command in commands_of_page(page):
            keys = [key for key in RUNS if key[0] == command.page and key[1] in command.text and not command.needs]
            for key in keys:
                runs[key].append(command)
            if command.needs:
                classes[command] = "marked"
            elif keys:
                classes[command] = "by a run"
            else:
                classes[command] = "up to training" if UP_TO_TRAINING.match(command.text) else "here"
    assert [key for key, found in runs.items() if len(found) != 1] == [], "each entry of RUNS is about one command"
    return classes


def shown_flags(page: str, words: str) -> list[str]:
    """The flags of the one train command on ``page`` that contains ``words``, as arguments. Omits ``...``."""
    [text] = [command.text for command in commands_of_page(ROOT / page) if words in command.text]
    before, driver, after = re.split(r"(\S+\.py|-m \S+)", text, maxsplit=1)
    assert driver, f"{before} starts no program"
    return [word for word in shlex.split(after) if word != "..."]


def make_model(directory: Path) -> Path:
    """A directory with the config.json of Qwen3-4B: all that reading a command looks at."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(QWEN3_4B))
    return directory
