"""Write docs/metrics.md from the table of metrics.

python tools/make_metrics_docs.py [--check]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from slime.observability import metric_table  # noqa: E402 - the repository's root comes first

PAGE = ROOT / "docs" / "metrics.md"
HEAD = """---
search:
  boost: 0.5
---

# Metrics

Look up a metric. `tools/make_metrics_docs.py` writes this page from `slime/observability/metric_table.py`.

Every run writes its metrics to `<output-dir>/<experiment>/metrics.jsonl`, one record per line. Flags select TensorBoard
and Weights & Biases in addition (see [observability](observability.md)). The x axis of `train/` is `train/step`, the
number of optimizer steps. That of `eval/` is `eval/step`, the number of rollouts trained on. All other metrics are
plotted over `rollout/step`, the number of the rollout. A value that is not finite is `null` in the file.
"""
AXES = {"train": "`train/step`", "eval": "`eval/step`"}


def page() -> str:
    """The whole document."""
    parts = [HEAD]
    # A dict keeps the order of the table, which is the order of the page.
    for prefix in dict.fromkeys(entry.name.split("/")[0] for entry in metric_table.METRICS):
        axis = AXES.get(prefix, "`rollout/step`")
        parts.append(f"\n## {prefix}/\n\nOver {axis}.\n")
        parts.append("| metric | meaning | unit | reduction | when |\n|---|---|---|---|---|")
        for entry in metric_table.METRICS:
            if entry.name.startswith(prefix + "/"):
                when = entry.when or "always"
                parts.append(f"| `{entry.name}` | {entry.meaning} | {entry.unit} | {entry.reduction} | {when} |")
    return "\n".join(parts) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail when the page is not current, write nothing")
    options = parser.parse_args()
    if options.check:
        return int(PAGE.read_text(encoding="utf-8") != page())
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
