"""The environment of a reader: a folder with the repository, and the models, data and runs that commands name.

Absolute paths of the pages (``/models``, ``/data``, ...) lie below the folder. Models are tiny: with weights for tools
that convert them, only the ``config.json`` of the real model for what plans and checks.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow
import pyarrow.parquet
from safetensors.numpy import load_file, save_file

from benchmarks.made_run import make_run
from slime.data.dump_file import save_debug_rollout_data
from slime.data.ledger import Ledger, ledger_path
from slime.data.sample import Sample
from slime.observability.run_info import write_run_info
from slime.observability.sample_record import read_rows, record_file, record_rollout, record_training, sample_of_row
from tests.doc_commands import ROOT, blocks, make_model
from tests.programs import run_program
from tools.hub_configs import hub_config
from tools.make_presets import load_presets
from tools.make_tiny_task import ModelShape, TinyTask

__all__ = ["A_RUN", "add_missing_flags", "in_place", "prepare"]

A_RUN = "--hf-checkpoint MODEL --prompt-data prompts.jsonl --rm-type math --rollout-num-gpus 2 --num-rollout 3 "
A_RUN += "--actor-num-gpus-per-node 2 --rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 64"
"""The flags that replace ``...`` in a train command."""
LINKED = ("benchmarks", "docs", "examples", "slime", "slime_plugins", "tests", "tools")
LINKED += ("Makefile", "pyproject.toml", "train.py", "train_async.py")
MESSAGES = [{"role": "user", "content": "1+1="}]
ROW = {"prompt": MESSAGES, "messages": MESSAGES, "input": "1+1=", "label": "2", "answers": ["2"], "images": []}
DATA = ("prompts.jsonl", "train.jsonl", "outputs/eval_multi_task/short.jsonl", "outputs/eval_multi_task/overlap.jsonl")
DATA += ("data/dapo-math-17k.jsonl", "data/texts/texts.jsonl")
DATA += tuple(f"{root}{name}/{name}.jsonl" for root in ("", "data/") for name in ("dapo-math-17k", "aime-2024"))
DATA += tuple(f"data/gsm8k/{name}.parquet" for name in ("train", "test"))
_ROOTS = re.compile(r"(?<![\w.:/])/(models|data|run|out|tmp)(?=[/\s'\"]|$)")


def in_place(text: str, place: Path) -> str:
    """A command with the pages' absolute paths below the folder."""
    return _ROOTS.sub(rf"{place}/\1", text)


def add_missing_flags(words: list[str]) -> list[str]:
    """Fill in ``...``. Of two equal flags the later one counts, so the page's flags come last."""
    if "..." in words:
        first = next(i for i, word in enumerate(words) if word == "..." or re.match(r"--\w", word))
        words = [*words[:first], *A_RUN.split(), *words[first:]]
        words.remove("...")
    return words


def prepare(place: Path, commands: Sequence[str], task: TinyTask) -> None:
    """Put into the empty folder what these commands read."""
    for name in LINKED:
        (place / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "scripts", place / "scripts")
    (place / ".venv").symlink_to(sys.prefix)
    for name in DATA:
        _write_rows(place / name)
    [reward] = [
        code for code in blocks(ROOT / "docs/en/get_started/quick_start.md", "python") if "def reward_func" in code
    ]
    (place / "my_reward.py").write_text(reward)
    (place / "MODEL").symlink_to(task.model)
    make_model(place / "Qwen3-4B")
    for command in commands:
        _make_models(place, command, task)
        if "convert_torch_dist_to_hf" in command:
            (place / "run").mkdir()
            (place / "run" / "iter_0000099").symlink_to(place / "models" / "X_torch_dist" / "release")
        if "slime doctor mismatch" in command and not (place / "dump").exists():
            _make_agreeing_run(place, Path(task.model))
        for run in re.findall(r"outputs/(?:demo/grpo|run)", command):
            if not (place / run).exists():
                make_run(place / run, num_rollouts=4, num_samples=4, response_tokens=20)
        if "dump/3.pt" in command:
            _make_dump(place / "dump" / "3.pt", place / "outputs" / "run")
        if "slime doctor ledger" in command:
            _make_ledger(place / command.split()[-1])


def _write_rows(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([ROW] * 64), path)
    else:
        path.write_text((json.dumps(ROW) + "\n") * 64)


def _make_models(place: Path, command: str, task: TinyTask) -> None:
    for script in re.findall(r"scripts/(run-\S+\.sh)", command):
        text = (ROOT / "scripts" / script).read_text()
        [(preset, name)] = re.findall(r"^model (\S+) (\S+)", text, re.MULTILINE)
        root = place / "models" if "MODEL_DIR=" in command else place
        _make_config(root / name, preset)
        if "_torch_dist" in text:  # the page says before how it is made
            converted = root / f"{name}_torch_dist"
            (converted / "release").mkdir(parents=True)
            (converted / "latest_checkpointed_iteration.txt").write_text("release")
            (converted / "release" / "metadata.json").write_text("{}")
    for name in re.findall(r"(?<!\w)/models/([\w.-]+)", command):
        path = place / "models" / name
        if "tools/" not in command and not path.exists():
            _make_config(path, name[0].lower() + name[1:])
        elif "tools/" in command and name in WEIGHTS and not path.exists():
            WEIGHTS[name](Path(task.model), path)
    if "tools/convert_hf_to_torch_dist.py" in command:
        for preset in (place / "scripts" / "models").glob("*.sh"):
            _shrink(preset)


def _make_config(path: Path, preset: str) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(hub_config(load_presets()[preset].facts)))


def _shrink(preset: Path) -> None:
    """The sizes of the tiny model in place of the preset's."""
    shape = ModelShape()
    sizes = {"num-layers": shape.num_layers, "hidden-size": shape.hidden_size, "ffn-hidden-size": shape.ffn_hidden_size}
    sizes |= {"num-attention-heads": shape.num_heads, "num-query-groups": shape.num_kv_heads}
    text = preset.read_text()
    for flag, size in (sizes | {"kv-channels": shape.head_dim}).items():
        text = re.sub(rf"(?<=--{flag} )\S+", str(size), text)
    preset.write_text(re.sub(r"--(vocab-size|rotary-base) .*", "", text))


def _dense(source: Path, path: Path) -> None:
    shutil.copytree(source, path)


def _with_experts(source: Path, path: Path) -> None:
    """The names of a mixture with one expert per layer: tools that rewrite tensors look at names."""
    shutil.copytree(source, path)
    file = path / "model.safetensors"
    tensors = {re.sub(r"mlp\.(\w+_proj)", r"mlp.experts.0.\1", name): value for name, value in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


def _in_eight_bits(source: Path, path: Path) -> None:
    _tool("convert_hf_to_fp8.py", "--model-dir", source, "--save-dir", path)


def _in_four_bits(source: Path, path: Path) -> None:
    _with_experts(source, path.with_name("experts"))
    _tool("convert_hf_to_int4_direct.py", "--model-dir", path.with_name("experts"), "--save-dir", path)


def _tool(name: str, *flags: object) -> None:
    run_program(ROOT / "tools" / name, *flags).check_returncode()


WEIGHTS: dict[str, Callable[[Path, Path], None]] = {
    "DeepSeek-R1": _in_eight_bits,
    "Kimi-K2-Thinking": _in_four_bits,
    "Qwen3-30B-A3B": _with_experts,
    "Qwen3-4B": _dense,
    "X": _dense,
}
"""Models whose tensors a tool on the pages reads."""


def _make_agreeing_run(place: Path, model: Path) -> None:
    """One sample of rollout 12 whose log-probs are the model's on both sides, as a run's record and as a dump."""
    import torch
    from transformers import AutoModelForCausalLM

    ids, num_prompt = torch.arange(5, 45), 8
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = loaded(input_ids=ids[None]).logits[0].double()
    log_probs = torch.log_softmax(logits, -1)[torch.arange(num_prompt - 1, len(ids) - 1), ids[num_prompt:]].float()
    for name in ("hf_10", "hf_11", "outputs/run/hf_11"):
        shutil.copytree(model, place / name)
    args = Namespace(reward_key=None, hf_checkpoint=str(model), rollout_temperature=1.0)
    write_run_info(place / "outputs" / "run", vars(args), ["train.py", "--hf-checkpoint", str(model)])
    sample = Sample(index=0, tokens=ids.tolist(), response="x", response_length=len(log_probs), reward=1.0)
    sample.rollout_log_probs = log_probs.tolist()
    record_rollout(place / "outputs" / "run", [sample], rollout_id=12, limit=1, reward_key=None)
    columns = {"partition": [0], "sample_indices": [0], "rewards": [1.0], "log_probs": [log_probs]}
    record_training(place / "outputs" / "run", columns, rollout_id=12, limit=1, data_parallel_rank=0)
    (place / "dump").mkdir()
    trained = {"tokens": ids, "loss_masks": torch.ones(len(log_probs)), "weight_versions": ["3"]}
    trained |= {"log_probs": log_probs, "rollout_log_probs": log_probs}
    torch.save({"samples": [trained]}, place / "dump" / "train_12.pt")


def _make_dump(path: Path, run: Path) -> None:
    """Samples of a run's record as ``--save-debug-rollout-data`` writes them."""
    samples = [sample_of_row(row) for row in read_rows(record_file(run, "rollout", 3))]
    save_debug_rollout_data(str(path), samples, rollout_id=3, evaluation=False)


def _make_ledger(run: Path) -> None:
    run.mkdir(parents=True)
    ledger = Ledger(ledger_path(None, run))
    ledger.write("begin", rollout=0)
    ledger.write("drawn", groups=[0, 1])
    ledger.write("used", rollout=0, groups=[0, 1])
    ledger.write("trained", rollout=0)
    ledger.close()
