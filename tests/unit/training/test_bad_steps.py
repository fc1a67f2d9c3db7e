"""The state after a step that raises."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slime.backends.training.steps import BadSteps
from slime.utils.errors import SlimeError


@pytest.mark.parametrize(("error", "has_fix"), [(torch.OutOfMemoryError("no room"), True), (ValueError("odd"), False)])
def test_a_full_device_is_told_with_the_flags_that_need_less(tmp_path: Path, error: Exception, has_fix: bool) -> None:
    with pytest.raises(SlimeError) as caught, BadSteps(str(tmp_path), 3).dumping(7, {"tokens": []}):
        raise error
    assert f"trainer rank 3 failed on rollout 7: {type(error).__name__}: {error}" in str(caught.value)
    assert ("lower --max-tokens-per-gpu" in str(caught.value)) is has_fix
    assert torch.load(tmp_path / "failed_steps" / "rollout_7_rank_3.pt")["batch"] == {"tokens": []}


def test_a_batch_that_cannot_be_written_does_not_hide_why_its_step_failed(tmp_path: Path) -> None:
    (tmp_path / "failed_steps" / "rollout_7_rank_3.pt").mkdir(parents=True)
    with pytest.raises(SlimeError) as caught, BadSteps(str(tmp_path), 3).dumping(7, {"tokens": []}):
        raise ValueError("odd")
    assert "failed on rollout 7: ValueError: odd Its batch could not be written to " in str(caught.value)
    steps = BadSteps(str(tmp_path / "failed_steps" / "rollout_7_rank_3.pt" / "file"), 3)
    (tmp_path / "failed_steps" / "rollout_7_rank_3.pt" / "file").write_text("no directory")
    assert steps.count(7, 0, {}, "gradients are not finite") == 1.0
