"""Launch scripts run dry: the command that they would submit, as words."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.unit.scripts.bash_arrays import ROOT

__all__ = ["SCRIPTS", "Command", "dry_run", "dry_run_with_files", "launchers", "run_script"]

SCRIPTS = ROOT / "scripts"
_DATA = ("MATH_DATA", "AIME_DATA", "SFT_DATA", "GSM8K_DATA", "GSM8K_TEST_DATA")


@dataclass(frozen=True)
class Command:
    """A dry run's output.

    Attributes:
        submit: the words of ``ray job submit`` before ``--``.
        entry: the program that the job runs.
        argv: its arguments.
        environment: the job's environment variables.
    """

    submit: list[str]
    entry: str
    argv: list[str]
    environment: dict[str, str]

    @property
    def flags(self) -> dict[str, list[str]]:
        """Flag -> its values. Of two equal flags the later one counts, as for the parser."""
        found: dict[str, list[str]] = {}
        for word in self.argv:
            if word.startswith("--"):
                found[word] = values = []
            else:
                values.append(word)
        return found

    def value(self, flag: str) -> str:
        """The flag's only value. Empty for a switch and without the flag."""
        return " ".join(self.flags.get(flag, []))


def launchers() -> list[str]:
    """Every launch script, as a path below scripts/."""
    return sorted(str(path.relative_to(SCRIPTS)) for path in SCRIPTS.rglob("run-*.sh"))


def run_script(
    path: Path | str, *flags: str, env: Mapping[str, str] | None = None, cwd: Path = ROOT, timeout: float = 60
) -> subprocess.CompletedProcess[str]:
    """Run a script with a clean environment in which python3 is this Python. Without a GPU it assumes eight."""
    path = Path(path)
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", **(env or {})}
    return subprocess.run(
        ["bash", str(path if path.is_absolute() else SCRIPTS / path), *flags],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def dry_run(path: Path | str, *flags: str, env: Mapping[str, str] | None = None) -> Command:
    done = run_script(path, "--dry-run", *flags, env={"NUM_GPUS": "8"} | dict(env or {}))
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    words = shlex.split(done.stdout.replace(" \\\n", " "))
    end = words.index("--")
    (text,) = [word for word in words[:end] if word.startswith("--runtime-env-json=")]
    assert words[end + 1] == "python3"
    return Command(
        submit=words[:end],
        entry=words[end + 2],
        argv=words[end + 3 :],
        environment=json.loads(text.partition("=")[2])["env_vars"],
    )


def dry_run_with_files(
    path: str, place: Path, model_config: dict[str, Any], env: Mapping[str, str] | None = None
) -> Command:
    """A dry run for someone who has the data below ``place`` and, of every model, the ``config.json``."""
    data = place / "data.jsonl"
    data.write_text('{"prompt": "1+1=", "messages": [], "label": "2"}\n' * 256)
    engines = place / "sglang.yaml"  # the file that a script with --sglang-config would write
    engines.write_text((SCRIPTS / path).read_text().partition("<<'YAML'\n")[2].partition("YAML\n")[0])
    environment = {"BASE_DIR": str(place), "SGLANG_CONFIG_FILE": str(engines)} | dict.fromkeys(_DATA, str(data))
    made = dry_run(path, env=environment | dict(env or {}))
    for flag in ("--hf-checkpoint", "--ref-load", "--opd-teacher-load"):
        if flag in made.flags:
            model = Path(made.value(flag))
            model.mkdir(exist_ok=True)
            (model / "config.json").write_text(json.dumps(model_config))
    return made
