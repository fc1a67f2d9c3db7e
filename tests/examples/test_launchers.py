"""Every launch script of the examples, run dry: its flags parse, its functions load, its sizes divide each other."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from slime.cli import main
from slime.ray.arguments import parse_only
from tests.e2e.running import ROOT
from tests.unit.scripts.dry_run import dry_run, dry_run_with_files
from tools.hub_configs import hub_config
from tools.make_presets import load_presets

EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(str(path.relative_to(EXAMPLES)) for path in EXAMPLES.glob("*/run-*.sh"))
DATA = ("MATH_DATA", "SFT_DATA", "SEARCH_DATA", "SWE_DATA", "GEO3K_DATA", "TAU_DATA", "ENVIRONMENT_DATA")
ROW = '{"prompt": "0", "problem": "q", "messages": [], "label": "1", "answer": "1", "answers": ["1"], "metadata": {}}\n'
PRESETS = load_presets()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Data, and the directory from which scripts are started."""
    (tmp_path / "rows.jsonl").write_text(ROW * 256)
    (tmp_path / "eval.yaml").write_text(f"datasets: [{{name: a, path: {tmp_path}/rows.jsonl}}]")
    monkeypatch.chdir(ROOT)
    return tmp_path


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_would_start_and_is_planned(script: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = EXAMPLES / script
    preset = re.search(r"^model (\S+) ", path.read_text(), re.MULTILINE)[1]
    own = dict.fromkeys(DATA, f"{place}/rows.jsonl") | {"EVAL_CONFIG": f"{place}/eval.yaml"}
    made = dry_run_with_files(str(path), place, hub_config(PRESETS[preset].facts), env=own)
    assert made.flags.keys() >= {"--prompt-data", "--save", "--load", "--hf-checkpoint"}
    assert made.environment["PYTHONPATH"] == str(ROOT)
    status = main(["plan", "--json", made.entry, *made.argv])
    plan = json.loads(capsys.readouterr().out)
    assert plan["problems"] == plan["gaps"] == []
    assert status == 0
    args, problems = parse_only(made.argv, is_async=made.entry.endswith("train_async.py"))
    assert problems == []
    assert args is not None
    assert [str(notice) for notice in args.notices if "unknown flag" in str(notice)] == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_readme_of_an_example_names_its_scripts(script: str) -> None:
    assert f"bash examples/{script}" in (EXAMPLES / script).with_name("README.md").read_text()


def test_credentials_of_the_user_simulator_and_of_sandboxes_reach_the_job() -> None:
    made = dry_run(EXAMPLES / "tau-bench" / "run-tau-bench-qwen3-4B.sh", env={"GEMINI_API_KEY": "k"})
    assert made.environment["GEMINI_API_KEY"] == "k"
    script = EXAMPLES / "coding_agent_rl" / "run-coding-agent-qwen3.5-35B-A3B.sh"
    made = dry_run(script, env={"SLIME_AGENT_NODE_TARBALL": "/node.tar"})
    assert made.environment["SLIME_AGENT_NODE_TARBALL"] == "/node.tar"


def test_shellcheck_has_nothing_to_say() -> None:
    program = Path(sys.executable).parent / "shellcheck"  # set-up installs it
    paths = [str(EXAMPLES / script) for script in SCRIPTS]
    command = [program, "--external-sources", "--source-path=SCRIPTDIR", *paths]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
