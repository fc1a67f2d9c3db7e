"""Write the tables of model pages: the families, and the plans of the launch scripts.

    python tools/make_model_pages.py            write the tables between the marks of the pages
    python tools/make_model_pages.py --check    exit with 1 and name the pages that are out of date

Every script is run dry, with a model directory that holds nothing but the ``config.json`` of its preset. Models that
have no script get a layout of :data:`PAGES`. Prose is written by hand and left alone.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.marked_part import with_part
from slime.config.plan import Plan, build
from slime.models.family import families
from slime.ray.arguments import parse_only
from tests.unit.scripts.bash_arrays import model_words
from tests.unit.scripts.dry_run import SCRIPTS, dry_run_with_files, launchers
from tools.hub_configs import hub_config
from tools.make_presets import load_presets

ROOT = Path(__file__).resolve().parents[1]
Section = TypeVar("Section")
DOCS = ROOT / "docs" / "models"
GUIDES = ROOT / "docs" / "en" / "examples"
BEGIN, END = "<!-- plans: begin -->", "<!-- plans: end -->"
FAMILIES = ROOT / "docs" / "model_families.md"
FAMILY_MARKS = ("<!-- families: begin -->", "<!-- families: end -->")
# The pages show one GPU size, so that their numbers can be compared.
DEVICE_GIB = 80


@dataclass(frozen=True)
class Layout:
    """A placement for a model without a launch script: nodes of eight devices that trainer and engines share.

    ``tp``, ``pp``, ``cp`` are the trainer's, ``ep`` that of its experts, ``engine`` the devices of one engine.
    """

    nodes: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    engine: int = 1
    tokens: int = 9216
    is_optimizer_on_host: bool = False

    def flags(self) -> list[str]:
        words = f"--actor-num-nodes {self.nodes} --actor-num-gpus-per-node 8 --colocate {RECIPE}"
        words += f" --tensor-model-parallel-size {self.tp} --pipeline-model-parallel-size {self.pp}"
        words += f" --context-parallel-size {self.cp}"
        words += f" --expert-model-parallel-size {self.ep} --expert-tensor-parallel-size 1"
        words += f" --max-tokens-per-gpu {self.tokens} --rollout-num-gpus-per-engine {self.engine}"
        # Megatron accepts sequence parallelism with tensor parallelism only.
        words += " --sequence-parallel" * (self.tp > 1)
        words += f" {OPTIMIZER_ON_HOST}" * self.is_optimizer_on_host
        return words.split()


RECIPE = (
    "--rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256 --rollout-max-response-len 8192 "
    "--num-rollout 3000 --rm-type deepscaler --use-dynamic-batch-size --sglang-mem-fraction-static 0.7 "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
)
OPTIMIZER_ON_HOST = "--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer"
PAGES: dict[str, dict[str, Layout | None]] = {
    "qwen3": {
        "qwen3-0.6B": Layout(),
        "qwen3-1.7B": Layout(),
        "qwen3-4B": None,
        "qwen3-4B-Instruct-2507": Layout(tp=2, engine=2),
        "qwen3-8B": Layout(tp=2, engine=2),
        "qwen3-14B": Layout(tp=4, engine=2),
        "qwen3-32B": None,
    },
    "qwen3_moe": {"qwen3-30B-A3B": None, "qwen3-235B-A22B": None},
    "qwen2_5": {
        "qwen2.5-0.5B": None,
        "qwen2.5-1.5B": Layout(),
        "qwen2.5-3B": Layout(),
        "qwen2.5-7B": Layout(tp=2, engine=2),
        "qwen2.5-32B": Layout(tp=8, engine=4, is_optimizer_on_host=True),
    },
    "llama3": {
        "llama3.2-3B-Instruct": Layout(),
        "llama3-8B": Layout(tp=2, engine=2),
        "llama3.1-8B-Instruct": Layout(tp=2, engine=2),
        "llama3-70B": Layout(nodes=2, tp=8, pp=2, engine=8, is_optimizer_on_host=True),
    },
    "glm4": {"glm4-9B": None, "glm4-32B-0414": Layout(tp=8, engine=4, is_optimizer_on_host=True)},
    "glm4_5": {
        "glm4.5-106B-A12B": Layout(nodes=4, tp=4, pp=2, ep=16, engine=8),
        "glm4.5-355B-A32B": Layout(nodes=8, tp=8, pp=4, ep=16, engine=16, is_optimizer_on_host=True),
        "glm4.6-355B-A32B": Layout(nodes=8, tp=8, pp=4, ep=16, engine=16, is_optimizer_on_host=True),
        "glm4.7-355B-A32B": None,
        "glm4.7-30B-A3B": None,
    },
    "deepseek": {"deepseek-v3": None},
    "kimi_k2": {"kimi-k2": None, "kimi-k2-thinking": None},
    "moonlight": {"moonlight": None},
    "mimo": {"mimo-7B-rl": None},
    "qwen3_next": {"qwen3-next-80B-A3B": None},
    "qwen3_5": {
        "qwen3.5-0.8B": Layout(),
        "qwen3.5-4B": Layout(tp=2, engine=2),
        "qwen3.5-9B": Layout(tp=2, engine=2),
        "qwen3.5-27B": None,
        "qwen3.5-35B-A3B": None,
    },
    "glm5": {"glm5-744B-A40B": None, "glm5.2-744B-A40B": None},
    "minimax_m2": {"minimax-m2": None},
}

SCRIPTS_OF_GUIDES = {
    "qwen3-4B": "run-qwen3-4B.sh",
    "glm4-9B": "run-glm4-9B.sh",
    "glm4.5-355B-A32B": "run-glm4.7-355B-A32B.sh",
}


@dataclass(frozen=True)
class Row:
    """One line of a table: its name and its plan."""

    name: str
    plan: Plan
    is_supervised: bool


def pages() -> dict[Path, str]:
    """The text of every page that has a table.

    Raises:
        ValueError: a page lacks the marks, or a launch script has a model that is on no page.
    """
    with tempfile.TemporaryDirectory() as name:
        reader = Reader(Path(name))
        scripts = {script: _model_of(script)[0] for script in launchers()}
        # Without this check a new launch script would be missing from the pages without a message.
        if homeless := set(scripts.values()) - {preset for presets in PAGES.values() for preset in presets}:
            raise ValueError(
                f"launch scripts use {sorted(homeless)}: give these presets a page in {Path(__file__).name}"
            )
        result = {}
        for page, presets in PAGES.items():
            rows = []
            for preset, layout in presets.items():
                rows += [reader.script(script) for script in scripts if scripts[script] == preset]
                rows += [reader.layout(preset, layout)] if layout else []
            path = DOCS / f"{page}.md"
            result[path] = _with_table(path, _table(rows, "README.md"))
        for guide, script in SCRIPTS_OF_GUIDES.items():
            path = GUIDES / f"{guide}.md"
            result[path] = _with_table(path, _table([reader.script(script)], "../../models/README.md"))
        result[FAMILIES] = with_part(str(FAMILIES), FAMILIES.read_text(encoding="utf-8"), FAMILY_MARKS, family_table())
        return result


def family_table() -> str:
    """Every registered family, in the order of their names."""
    rows = [(f"`{name}`", family.models, family.particulars) for name, family in sorted(families().items())]
    return "\n".join(
        f"| {' | '.join(row)} |" for row in [("`model_type`", "models", "particulars"), ("---",) * 3, *rows]
    )


def _model_of(script: str) -> tuple[str, str]:
    """Its preset, and the directory of the model."""
    found = re.search(r"^model (\S+) (\S+)", (SCRIPTS / script).read_text(encoding="utf-8"), re.MULTILINE)
    assert found, f"{script} names no model"
    return found[1], found[2]


class Reader:
    """Plans launch scripts and layouts. Models have only their ``config.json``, data files one row."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._presets = load_presets()

    def script(self, name: str) -> Row:
        """A launch script, run dry."""
        preset, directory = _model_of(name)
        made = dry_run_with_files(name, self._place, self._config(preset, directory))
        plan = _plan(made.argv, is_async=made.entry.endswith("train_async.py"))
        return Row(f"`{name}`", plan, "--debug-train-only" in made.flags)

    def layout(self, preset: str, layout: Layout) -> Row:
        """A model without a script."""
        model = self._place / preset
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps(self._config(preset)), encoding="utf-8")
        data = self._place / "prompts.jsonl"
        data.write_text('{"input": "1+1="}\n', encoding="utf-8")
        words = [*model_words()[preset], "--hf-checkpoint", str(model), "--prompt-data", str(data)]
        return Row(preset, _plan(words + layout.flags(), is_async=False), False)

    def _config(self, preset: str, directory: str = "") -> dict[str, Any]:
        # From the preset's facts, not downloaded: the page must be the same without a network.
        config = hub_config(self._presets[preset].facts)
        if directory in IN_8_BITS:
            config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        if directory in IN_4_BITS:
            groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32}}}
            config["quantization_config"] = {"quant_method": "compressed-tensors", "config_groups": groups}
        return config


IN_8_BITS = ("DeepSeek-R1", "Kimi-K2-Instruct", "Kimi-K2-Thinking-fp8", "Qwen3-4B-FP8", "Qwen3-30B-A3B-FP8")
IN_4_BITS = ("Kimi-K2-Thinking", "Moonlight-16B-A3B-Instruct-INT4", "Qwen3-235B-A22B-INT4", "Qwen3-30B-A3B-INT4")
"""Directories of launch scripts whose weights are 8 or 4 bits wide."""


def _plan(argv: list[str], *, is_async: bool) -> Plan:
    # Hooks of a script may import packages that this machine lacks. The plan does not call them.
    args, problems = parse_only(argv, is_async=is_async, loads_hooks=False)
    assert args is not None, problems
    return build(args, title="", device_bytes=DEVICE_GIB * 2**30, problems=problems)


def _table(rows: list[Row], columns: str) -> str:
    """``columns``: the page that explains them, relative to the page of the table."""
    heads = ("recipe", "GPUs", "trainer", "engines", "a rollout", "trainer rank, GiB", "GPU of an engine, GiB")
    lines = [LEGEND.format(columns=columns), "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    lines += [f"| {' | '.join((row.name, *_cells(row)))} |" for row in rows]
    return "\n".join(lines)


def _known(section: Section | None) -> Section:
    """A section of the plan that every command has."""
    assert section is not None
    return section


def _cells(row: Row) -> tuple[str, ...]:
    return (_devices(row), _layout(row.plan), _engines(row), _rollout(row), _rank(row.plan), _engine(row))


def _devices(row: Row) -> str:
    placement = _known(row.plan.placement)
    trainers = placement.num_trainer_ranks
    if row.is_supervised:
        return f"{trainers}, no engines"
    return f"{trainers}, shared" if placement.is_colocated else f"{trainers} + {placement.num_slots - trainers}"


def _layout(plan: Plan) -> str:
    layout = _known(plan.layout)
    sizes = {"TP": layout.tp, "PP": layout.pp, "CP": layout.cp, "EP": layout.ep, "DP": layout.dp}
    return " ".join(f"{name} {size}" for name, size in sizes.items() if size > 1 or name == "DP")


def _engines(row: Row) -> str:
    if row.is_supervised:
        return "-"
    return ", ".join(
        f"{group.num_engines} of {group.devices_per_engine}" + (f" ({group.kind})" if group.kind != "regular" else "")
        for group in _known(row.plan.placement).engines
    )


def _rollout(row: Row) -> str:
    batch = _known(row.plan.batch)
    if row.is_supervised:
        return f"{batch.samples:,} conversations"
    steps = f", {batch.steps} steps" if batch.steps > 1 else ""
    return f"{batch.prompts} x {batch.samples_per_prompt} of ≤ {batch.max_response:,} tokens{steps}"


def _rank(plan: Plan) -> str:
    if not plan.stages:
        return "not covered"
    # The fullest pipeline stage decides whether the run fits.
    stage = max(plan.stages, key=lambda stage: stage.total)
    parts = (stage.weights, stage.gradients, stage.optimizer, stage.activations + stage.logits)
    return f"{_judged(stage.total)} = {' + '.join(map(_gib, parts))}"


def _judged(size: int) -> str:
    # Bold marks an estimate above the GPU's memory.
    return f"**{_gib(size)}**" if size > DEVICE_GIB * 2**30 else _gib(size)


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f}" if size else "0"


def _engine(row: Row) -> str:
    if row.is_supervised:
        return "-"
    engine = row.plan.engine
    if engine is None:
        return "not covered"
    if not engine.tokens:
        return f"**{_gib(engine.weights)}**: no room for a cache"
    return f"{_gib(engine.weights)} + {_gib(engine.pool)} for {engine.tokens / 1000:,.0f} k tokens"


LEGEND = (
    f"Estimates of `slime plan` for GPUs of {DEVICE_GIB} GiB. A trainer rank holds weights + gradients + optimizer +\n"
    "activations and logits, a GPU of an engine weights + cache ([all columns]({columns}#the-tables))."
)


def _with_table(path: Path, table: str) -> str:
    return with_part(str(path), path.read_text(encoding="utf-8"), (BEGIN, END), table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="Write nothing; exit with 1 when a page is not current.")
    check = parser.parse_args().check
    changed = {path: text for path, text in pages().items() if path.read_text(encoding="utf-8") != text}
    for path, text in changed.items():
        if not check:
            path.write_text(text, encoding="utf-8")
        print(f"{'not current' if check else 'written'}: {path.relative_to(ROOT)}")
    return int(check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
