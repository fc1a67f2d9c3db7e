"""``--rollout-data-transport nixl``: a batch as the trainer gets it. Needs the package ``nixl``, but no GPU."""

from __future__ import annotations

import pytest

from tests.doc_commands import shown_flags
from tests.e2e.running import metrics, run_train, values
from tests.e2e.test_loop import grpo_flags


def test_a_trainer_sees_the_same_batch_whichever_way_it_comes(tiny_task, tmp_path):
    pytest.importorskip("nixl")
    made = grpo_flags(
        *(tiny_task, tmp_path, "--num-rollout", 2, "--save-debug-rollout-data", tmp_path / "{rollout_id}.pt"),
        *shown_flags("docs/cluster.md", "--rollout-data-transport"),
    )
    done = run_train(made, tmp_path)
    assert done.status == 0, done.output[-4000:]
    assert "Using NIXL backend" in done.output
    assert done.survivors() == []
    again = grpo_flags(tiny_task, tmp_path, "--load-debug-rollout-data", tmp_path / "{rollout_id}.pt")
    done = run_train([*again, "--num-rollout", 2, "--experiment-name", "again"], tmp_path)
    assert done.status == 0, done.output[-4000:]
    one, other = (metrics(tmp_path / name) for name in ("run", "again"))
    for name in ("train/loss", "train/grad_norm"):
        assert values(one, name) == pytest.approx(values(other, name), rel=1e-6, abs=1e-9)
