"""``slime.train`` and the loop of a notebook, as the page shows them, one rollout each in one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.doc_commands import blocks
from tests.e2e.running import ROOT, environment

PAGE = ROOT / "docs/en/get_started/usage.md"
SMALL = {"sglang_context_length": 128, "sglang_max_total_tokens": 8192, "rollout_batch_size": 4, "fp32": True}
SMALL |= {"rollout_max_response_len": 8, "n_samples_per_prompt": 2, "label_key": "label", "apply_chat_template": True}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_code_of_the_page_trains(tiny_task, tmp_path: Path) -> None:
    [shown] = [code for code in blocks(PAGE, "python") if "import slime\n" in code]
    [loop] = [code for code in blocks(PAGE, "python") if "start_run" in code]
    train = shown.partition("rewards =")[0].replace("num_rollout=10", f"num_rollout=1, **{SMALL!r}")
    loop = loop.replace("--num-rollout 10", "--num-rollout 1 --experiment-name loop")
    loop = loop.replace(".split())", ".split() + slime.api.command_line(SMALL))")
    loop = loop.replace("MODEL", str(tiny_task.model)).replace("prompts.jsonl", str(tiny_task.train))
    code = f"import slime.api\nSMALL = {SMALL!r}\n{train}\nprint(run.path)\nassert run.metric_rows()\n{loop}"
    code = code.replace('"MODEL"', repr(tiny_task.model)).replace('"prompts.jsonl"', repr(tiny_task.train))
    program = ["-c", code + "\nimport ray\nassert not ray.is_initialized()\n"]
    done = subprocess.run(
        [sys.executable, *program], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    for name in ("sums", "loop"):
        records = [json.loads(line) for line in (tmp_path / "outputs" / name / "metrics.jsonl").open()]
        assert [record["rollout/step"] for record in records if "rollout/raw_reward" in record] == [0]
