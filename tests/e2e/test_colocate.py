"""Trainer and engines on the same devices: the real stack in turns, with the engines' memory really given back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slime.backends.sglang_utils.engine import SGLangEngine
from slime.data.schedule import WEIGHTS, read_weights
from slime.ray.engines.fleet import EngineMemory
from slime.utils.net import free_port
from slime.weight_sync.send_distributed import DistributedSender
from slime.weight_sync.session import WeightUpdate, push_weights
from tests.doc_commands import shown_flags
from tests.e2e.engines import LocalFleet, make_engine
from tests.e2e.running import metrics, run_train, values
from tests.e2e.test_engine import generate, model_of, worst_difference
from tests.e2e.test_loop import grpo_flags
from tests.verification import verify

ROLLOUTS = 2


@pytest.fixture(scope="module")
def runs(tiny_task, tmp_path_factory) -> dict[str, Path]:
    """The same run with two engines on separate devices and on those of the two trainer ranks, and asynchronous."""
    outputs = {}
    never_stops = ("--rollout-function-path", "slime.rollout.fully_async_rollout.generate_rollout_fully_async")
    for name, more in (
        ("apart", ("--rollout-num-gpus", 2)),
        ("together", shown_flags("docs/colocate.md", "--colocate")),
        ("asynchronous", ("--rollout-num-gpus", 2, *never_stops, "--max-weight-staleness", 0)),
    ):
        output = outputs[name] = tmp_path_factory.mktemp(name)
        flags = grpo_flags(tiny_task, output, "--num-rollout", ROLLOUTS, "--check-weight-update-equal")
        del flags[(i := flags.index("--rollout-num-gpus")) : i + 2]
        flags = [*more, *shown_flags("docs/reproducibility.md", "--deterministic-mode"), *flags]
        flags += ["--save-debug-rollout-data", output / "dump" / "{rollout_id}.pt"]
        finished = run_train(flags, output, script="train_async.py" if name == "asynchronous" else "train.py")
        assert finished.status == 0, finished.output[-4000:]
        assert finished.survivors() == []
    return outputs


def dump(output: Path, rollout_id: int) -> list[dict[str, Any]]:
    return torch.load(output / "dump" / f"{rollout_id}.pt", weights_only=True)["samples"]


def test_turns_change_no_token_and_no_number(runs):
    for rollout_id in range(ROLLOUTS):
        apart, together = (dump(runs[name], rollout_id) for name in ("apart", "together"))
        assert [sample["tokens"] for sample in apart] == [sample["tokens"] for sample in together]
        assert [sample["reward"] for sample in apart] == [sample["reward"] for sample in together]
    apart, together = (metrics(runs[name] / "run") for name in ("apart", "together"))
    for name in ("train/loss", "train/grad_norm"):
        assert len(values(apart, name)) == ROLLOUTS
        verify(
            "losses and gradient norms with `--colocate`", "engines apart", values(together, name), values(apart, name)
        )


def test_a_staleness_of_zero_gives_the_weights_of_the_synchronous_run(runs):
    apart, asynchronous = (read_weights(runs[name] / "run" / WEIGHTS) for name in ("apart", "asynchronous"))
    assert len(apart) == ROLLOUTS + 1
    assert apart == asynchronous


def test_every_change_of_turns_is_timed(runs):
    apart, together = (metrics(runs[name] / "run") for name in ("apart", "together"))
    for name in ("sleep", "wake_up", "engine_offload", "engine_onload"):
        assert len(values(together, f"perf/{name}_time")) == ROLLOUTS
        assert values(apart, f"perf/{name}_time") == []


class OneEngine(EngineMemory):
    """The owner of a single engine without Ray."""

    memory_timeout_s, replaces_dead = 60.0, False
    fleet: Any = None

    def __init__(self, engine: SGLangEngine) -> None:
        self.fleet = LocalFleet([engine])

    def offloadable(self) -> Any:
        return self.fleet

    def lost(self, names: Any) -> list[str]:
        return []

    def pause_watch(self) -> None: ...

    def resume_watch(self) -> None: ...


def test_an_engine_gives_its_memory_back_and_serves_again_after_a_sync(tiny_task, fork_server, tmp_path):
    flags = ("--enable-memory-saver", "--max-total-tokens", "65536")
    engine = make_engine(tiny_task, fork_server, tmp_path / "log", *flags)
    try:
        engine.start()
        memory = OneEngine(engine)
        model = model_of(tiny_task)
        ids = [5, 6, 7, 8]
        generate(engine, ids)
        [(_, before)] = engine.rank_checksums()
        memory.offload()
        memory.offload()  # a repeated call is allowed
        [(_, released)] = engine.rank_checksums()
        changed = {name for name, checksum in before.items() if released[name] != checksum}
        assert changed >= {name for name in before if "proj" in name}, "norms are smaller than a page and stay"

        memory.onload_weights()
        fleet = LocalFleet([engine])
        sender = DistributedSender(fleet, group_name="again", timeout_s=600)
        sender.connect("127.0.0.1", free_port())
        update = WeightUpdate("7", max_chunk_bytes=1 << 20, timeout_s=600, continues=False)
        weights = [(name, tensor) for name, tensor in model.state_dict().items() if name != "lm_head.weight"]
        push_weights(fleet, sender, weights, update)
        sender.disconnect()
        memory.onload_kv()
        assert engine.rank_checksums() == [(0, before)]
        output, log_probs, version = generate(engine, ids)
        assert version == "7"
        assert worst_difference(model, ids, output, log_probs) < 1e-5
    finally:
        engine.stop()
