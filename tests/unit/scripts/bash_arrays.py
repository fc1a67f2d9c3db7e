"""The shell arrays that a preset sets, as words."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Mapping
from pathlib import Path

__all__ = ["MODELS", "ROOT", "model_words", "source"]

ROOT = Path(__file__).resolve().parents[3]
MODELS = ROOT / "scripts" / "models"

# The shell stops at the first preset that fails, be it by an unset variable.
_PRINT_ALL = r"""
set -euo pipefail
for name in "$@"; do
   (
      source "scripts/models/${name}.sh"
      printf '%s\037' "${name}" "${MODEL_ARGS[@]}"
      printf '\036'
   )
done
"""


def source(script: str, *, env: Mapping[str, str] | None = None, cwd: Path = ROOT) -> str:
    """Output of a bash script under ``set -euo pipefail`` with a separate environment."""
    result = subprocess.run(
        ["bash", "-c", f"set -euo pipefail\n{script}"],
        cwd=cwd,
        env={"PATH": "/usr/bin:/bin", **(env or {})},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert not result.stderr, result.stderr
    return result.stdout


@functools.cache
def model_words() -> dict[str, list[str]]:
    """Every preset's MODEL_ARGS, sourced in one bash process with a clean environment."""
    names = sorted(path.stem for path in MODELS.glob("*.sh"))
    result = subprocess.run(
        ["bash", "-c", _PRINT_ALL, "bash", *names],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    records = [record.split("\037")[:-1] for record in result.stdout.split("\036")[:-1]]
    return {name: words for name, *words in records}
