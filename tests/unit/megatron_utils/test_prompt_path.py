"""The files of slime that work on a prompt, from its line in a file to the gradient."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from slime.backends.megatron_utils.actor import MegatronTrainer
from slime.batch.compile import compile_train_data
from slime.batch.rewards import RewardArgs
from slime.batch.schedule import MicroBatchArgs, ParallelLayout
from slime.batch.ship import split_by_dp
from slime.config.groups import from_args
from slime.hooks import load_function
from slime.new.tiny_model import ModelShape, make_tiny_model
from slime.ray.arguments import parse_only
from slime.rollout.base_types import call_rollout_fn
from slime.rollout.data_source import make_data_source
from tests.architecture.sources import ROOT
from tests.unit.rollout.fake_engine import FakeEngine, completion

MOST_FILES = 64
"""May only fall. The goal is 45. The page of the architecture has the number."""

pytestmark = pytest.mark.usefixtures("trainer_rank")


@contextmanager
def visited() -> Iterator[set[str]]:
    """Files of slime whose functions run inside the block, in this thread or in one that starts there."""
    files: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name != "<module>":
            files.add(frame.f_code.co_filename)

    threading.setprofile(note)
    sys.setprofile(note)
    found: set[str] = set()
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        inside = (Path(file) for file in files if file.startswith(str(ROOT / "slime")))
        found |= {str(path.relative_to(ROOT)) for path in inside}


def test_a_prompt_passes_few_files(tmp_path: Path) -> None:
    args = _arguments(tmp_path)
    replies = FakeEngine(lambda payload, number: (200, completion(payload, [5 + number % 2, 6], text=str(number % 2))))
    try:
        args.sglang_router_ip, args.sglang_router_port = "127.0.0.1", replies.port
        trainer = MegatronTrainer(args, rank=0, world_size=1, with_ref=False)
        trainer.setup()
        with visited() as files:
            source = make_data_source(load_function(args.data_source_path), args)
            rollout = load_function(args.rollout_function_path, "rollout")
            groups = call_rollout_fn(rollout, args, 0, source, evaluation=False).samples
            data = compile_train_data(groups, rewards=from_args(RewardArgs, args), args=args)
            settings = from_args(MicroBatchArgs, args)
            layout = ParallelLayout(dp_size=1)
            shipment = split_by_dp(data, layout=layout, global_batch_size=args.global_batch_size, settings=settings)
            report = trainer.train(0, shipment.ranks[0])
    finally:
        replies.close()
    assert len(report.steps) == 1
    assert len(files) <= MOST_FILES, f"{len(files)} files:\n" + "\n".join(sorted(files))


def test_the_page_of_the_architecture_has_the_number() -> None:
    assert f"{MOST_FILES} files" in (ROOT / "docs/architecture.md").read_text(encoding="utf-8")


def _arguments(directory: Path) -> Any:
    model = make_tiny_model(directory / "model", shape=ModelShape(num_layers=1, hidden_size=32, ffn_hidden_size=64))
    prompts = directory / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{n}+1", "label": "1"}) + "\n" for n in range(2)))
    sizes = "--rollout-num-gpus 1 --actor-num-gpus-per-node 1 --num-rollout 1 --rollout-batch-size 2"
    more = "--n-samples-per-prompt 2 --global-batch-size 4 --rollout-max-response-len 8 --rm-type math --fp32"
    files = ["--hf-checkpoint", model, "--prompt-data", str(prompts), "--output-dir", str(directory / "outputs")]
    args, problems = parse_only([*files, "--apply-chat-template", *sizes.split(), *more.split()])
    assert args is not None, problems
    assert not problems
    return args
