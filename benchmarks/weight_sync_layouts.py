"""Bytes and messages of one weight sync of large models, counted without a GPU.

    python benchmarks/weight_sync_layouts.py             count and print
    python benchmarks/weight_sync_layouts.py --write     also replace the table in docs/weight_sync.md

Shapes are those of the presets, parallel sizes those of the launch scripts. The trainer's own gather runs on tensors
without data, with process groups that count instead of sending. Chunks and payloads are made by the sender's functions.
Two ranks are counted, the first ones of the first and of the last pipeline stage, and the larger figure is shown.
Weights are bfloat16, without prediction layers and quantization. Buckets are 2 GiB, those of the naive scheme 512 MiB.
"""

from __future__ import annotations

import argparse
import csv
import functools
import re
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import slime.backends.megatron_utils.actor  # noqa: F401 - prepares megatron.core before the first import of it
from benchmarks.marked_part import with_part
from slime.backends import EVERY_RANK, SOURCE, EngineInfo, NamedTensor, Recipients
from slime.backends.fsdp_utils.weights import hf_tensors
from slime.backends.megatron_utils.checkpoint.gather import Gather, Groups, Peers
from slime.backends.megatron_utils.checkpoint.tensors import (
    Dimensions,
    LocalTensor,
    Owned,
    Place,
    from_megatron,
    join,
    shard,
    to_megatron,
)
from slime.config.plan.placement import Layout, stage_layers
from slime.models.family import Rule, families
from slime.weight_sync.chunks import LEAST_BUCKET, WeightChunk, bucket_bytes, into_chunks
from slime.weight_sync.send_tensor import Opening, payloads
from slime.weight_sync.session import TrainerRanks
from slime.weight_sync.updater import WeightUpdater
from tools.hub_configs import PRESETS, model_of

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = {
    "Qwen3-30B-A3B": "run-qwen3-30B-A3B.sh",
    "GLM-4.7 355B": "run-glm4.7-355B-A32B.sh",
    "DeepSeek-R1": "run-deepseek-r1.sh",
    "Kimi K2": "run-kimi-k2-Instruct.sh",
}
PAGE = ROOT / "docs" / "weight_sync.md"
MARKS = ("<!-- layouts: begin -->", "<!-- layouts: end -->")
_LARGE_BUCKET = bucket_bytes(1 << 40)
_PADDING = 128  # rows of the vocabulary are padded to a multiple of this and TP


class CountingPeers(Peers):
    """A process group that moves nothing, and counts the bytes that this rank would receive."""

    def __init__(self, size: int, rank: int, members: Sequence[int] = ()) -> None:
        self.size, self.rank, self.members = size, rank, members
        self.num_bytes = self.num_calls = 0

    def _received(self, num_bytes: int) -> None:
        self.num_calls += 1
        self.num_bytes += num_bytes

    def all_gather(self, flat: torch.Tensor) -> torch.Tensor:
        self._received(flat.numel() * (self.size - 1))
        return flat.new_empty(flat.numel() * self.size)

    def gather(self, flat: torch.Tensor) -> torch.Tensor | None:
        self._received(flat.numel() * (self.size - 1) if self.rank == 0 else 0)
        return flat.new_empty(flat.numel() * self.size) if self.rank == 0 else None

    def broadcast(self, flat: torch.Tensor, source: int) -> None:
        self._received(flat.numel() if self.rank != source else 0)

    def to_first(self, flat: torch.Tensor, source: int) -> None:
        self._received(flat.numel() if self.rank == 0 else 0)

    def exchange(self, flat: torch.Tensor, give: Sequence[int], take: Sequence[int]) -> torch.Tensor:
        self._received(sum(take))
        return flat.new_empty(sum(take))


@dataclass(frozen=True)
class Recipe:
    """A launch script: its model, its trainer, and its engines."""

    preset: str
    layout: Layout
    stages: Sequence[range]
    gpus_per_engine: int
    expert_blocks: int

    @property
    def engines(self) -> list[EngineInfo]:
        width = self.gpus_per_engine
        return [
            EngineInfo(f"http://{first}", width, first_slot=first, expert_blocks=self.expert_blocks)
            for first in range(0, self.layout.world, width)
        ]


def read_recipe(script: str) -> Recipe:
    """From the table that the tests compare with the scripts."""
    with (ROOT / "tests" / "unit" / "scripts" / "launchers.csv").open(encoding="utf-8", newline="") as file:
        row = next(row for row in csv.DictReader(file) if row["script"] == script)
    tp, pp, cp, ep = (int(row[name] or 1) for name in ("tp", "pp", "cp", "ep"))
    layout = Layout(int(row["nodes"]) * int(row["gpus"]), tp, pp, cp, ep, 1, 1, True)
    ends = Namespace(decoder_first_pipeline_num_layers=None, decoder_last_pipeline_num_layers=None)
    for end in ("first", "last"):
        if row[end]:
            setattr(ends, f"decoder_{end}_pipeline_num_layers", int(row[end]))
    found = re.search(r"ep-size (\d+)", row["sglang"])
    blocks = int(found[1]) if found else 1
    num_layers = int(PRESETS[row["preset"]]["layers"])
    return Recipe(row["preset"], layout, stage_layers(ends, num_layers, pp), int(row["gpus_per_engine"]), blocks)


@functools.cache
def hf_names_and_shapes(preset: str) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint, bfloat16 and without data."""
    model = model_of(preset).to(torch.bfloat16)
    return {
        name: part
        for tensor in hf_tensors(model, set())
        for name, part in tensor.split(tensor.value.detach(), range(len(tensor.names)))
    }


@dataclass
class MetaTensors:
    """The tensors of one rank of the trainer, without data. As ``ModelTensors``, which needs a built model."""

    recipe: Recipe
    stage: int
    local: dict[Place, LocalTensor] = field(default_factory=dict)
    plan: list[Owned] = field(default_factory=list)

    def __post_init__(self) -> None:
        facts = PRESETS[self.recipe.preset]
        self.family = families()[facts["family"]]
        config = model_of(self.recipe.preset).config
        self.num_layers = int(facts["layers"])
        self.num_experts = int(facts["moe"]["experts"])
        vocab = int(facts["vocab"])
        self.size = Dimensions(config.num_key_value_heads, getattr(config, "head_dim", 0) or 0, vocab)
        checkpoint = hf_names_and_shapes(self.recipe.preset)
        used: set[str] = set()
        for place, rule in self._places():
            names = self.hf_names(place, 0)
            if any(name not in checkpoint for name in names):
                continue
            multiple = _PADDING * self.recipe.layout.tp
            rows = -(-vocab // multiple) * multiple
            whole = to_megatron([checkpoint[name] for name in names], rule, self.size, rows)
            mine = shard(whole, rule, 0, 1 if rule.is_expert else self.recipe.layout.tp)
            stage = self._stage(place, rule)
            self.plan.append(Owned(place, stage, tuple(mine.shape), mine.dtype))
            if stage == self.stage:
                self.local[place] = LocalTensor(place, "", mine, mine)
            ranks = self.recipe.layout.ep if rule.is_expert else 1
            used.update(name for rank in range(ranks) for name in self.hf_names(place, rank))
        missing = checkpoint.keys() - used
        assert not missing, f"{self.recipe.preset}: no rule for {sorted(missing)[:3]}"

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.recipe.layout.ep

    def _places(self) -> Iterator[tuple[Place, Rule]]:
        rules = [(index, rule) for index, rule in enumerate(self.family.rules) if "{mtp}" not in rule.megatron]
        yield from ((Place(-1, -1, index, 0), rule) for index, rule in rules if "{layer}" not in rule.megatron)
        for layer in range(self.num_layers):
            for index, rule in rules:
                if "{layer}" in rule.megatron:
                    for expert in range(self.num_local_experts if rule.is_expert else 1):
                        yield Place(-1, layer, index, expert), rule

    def _stage(self, place: Place, rule: Rule) -> int:
        if place.layer < 0:
            return 0 if rule.megatron.startswith("embedding") else self.recipe.layout.pp - 1
        return next(stage for stage, layers in enumerate(self.recipe.stages) if place.layer in layers)

    def rule(self, place: Place) -> Rule:
        return self.family.rules[place.rule]

    def expert(self, place: Place, expert_rank: int) -> int:
        return place.expert + expert_rank * self.num_local_experts

    def hf_names(self, place: Place, expert_rank: int) -> list[str]:
        return [name.format(layer=place.layer, expert=self.expert(place, expert_rank)) for name in self.rule(place).hf]


@dataclass(frozen=True)
class Counts:
    """Of one rank and the engine that it speaks for.

    Attributes:
        received: bytes from other trainer ranks.
        collectives: calls between trainer ranks about tensors.
        calls: HTTP calls per engine.
        text_bytes: bytes of all payloads of these calls.
        handle_bytes: bytes that the ranks of the engine give the speaker.
        exported: bytes of the tensors that the rank sends on.
    """

    received: int
    collectives: int
    calls: int
    text_bytes: int
    handle_bytes: int
    exported: int


def recipients_of(recipe: Recipe, *, colocated: bool) -> Recipients:
    """As the updater chooses them."""
    ranks = TrainerRanks(0, recipe.layout.world, timeout_s=60.0)
    updater = WeightUpdater(ranks, address="", shares_devices=colocated, timeout_s=60.0)
    return updater.recipients(recipe.engines)


def _groups(recipe: Recipe, rank: int) -> Groups:
    """The groups of a rank in Megatron's order tp-cp-ep-dp-pp. ETP is 1."""
    layout, at = recipe.layout, recipe.layout.ranks[rank]
    first = rank - at.ep
    return Groups(
        CountingPeers(layout.tp, at.tp),
        CountingPeers(1, 0),
        CountingPeers(layout.ep, at.ep, range(first, first + layout.ep)),
        CountingPeers(layout.pp, at.pp),
        is_first_copy=at.dp == 0 and at.cp == 0,
        is_first_expert_copy=rank % (layout.world // layout.pp) // layout.ep == 0,
    )


@functools.cache
def tensors_of(script: str, stage: int) -> MetaTensors:
    return MetaTensors(read_recipe(script), stage)


def count(script: str, rank: int, recipients: Recipients, max_bytes: int) -> Counts:
    """Export and send the weights of one rank of ``script``, without data."""
    recipe = read_recipe(script)
    tensors = tensors_of(script, recipe.layout.ranks[rank].pp)
    groups = _groups(recipe, rank)
    gather = Gather(tensors, groups, recipients)
    chunks = list(into_chunks(_exported(tensors, gather, max_bytes), max_bytes))
    peers = [peers for peers in vars(groups).values() if isinstance(peers, CountingPeers)]
    width = recipe.gpus_per_engine
    own = sum(len(payloads(chunk, [_HANDLE])[0]) for chunk in chunks)
    return Counts(
        received=sum(group.num_bytes for group in peers),
        collectives=sum(group.num_calls for group in peers),
        calls=len(chunks),
        text_bytes=width * own,
        handle_bytes=(width - 1) * (own if recipients.blocks else len(chunks) * len(payloads(_EMPTY, [_HANDLE])[0])),
        exported=sum(chunk.num_bytes for chunk in chunks),
    )


_EMPTY = WeightChunk([])
# Of constant size, about that of a handle to shared memory, whose length depends on the number of the process.
_HANDLE = Opening(bytes, (bytes(400),))


def _exported(tensors: MetaTensors, gather: Gather, max_bytes: int) -> Iterator[NamedTensor]:
    for bucket in gather.buckets(tensors.plan, max_bytes):
        for owned, expert_rank, shards in gather.pieces(bucket):
            rule = tensors.rule(owned.place)
            parts = from_megatron(join(shards, rule), rule, tensors.size)
            yield from zip(tensors.hf_names(owned.place, expert_rank), parts, strict=True)


def naive(script: str) -> Counts:
    """Every rank receives every tensor whole, and the payloads of all ranks of its engine, in buckets of 512 MiB."""
    recipe = read_recipe(script)
    chunks = list(into_chunks(hf_names_and_shapes(recipe.preset).items(), LEAST_BUCKET))
    texts = sum(len(payloads(chunk, [_HANDLE])[0]) for chunk in chunks)
    width = recipe.gpus_per_engine
    total = sum(chunk.num_bytes for chunk in chunks)
    return Counts(total, 0, len(chunks), width * texts, width * (width - 1) * texts, total)


def rows_of(name: str) -> Mapping[str, Counts]:
    """Way -> counts of the rank that receives most."""
    script = SCRIPTS[name]
    recipe = read_recipe(script)
    last = recipe.layout.world - recipe.layout.world // recipe.layout.pp
    shared, apart = (recipients_of(recipe, colocated=colocated) for colocated in (True, False))

    def most(recipients: Recipients) -> Counts:
        found = [count(script, rank, recipients, _LARGE_BUCKET) for rank in dict.fromkeys((0, last))]
        return max(found, key=lambda counts: counts.received)

    assert apart == SOURCE
    rows = {"naive": naive(script), "`--colocate`": most(shared)}
    if shared != EVERY_RANK:
        rows["`--colocate`, all experts to all ranks"] = most(EVERY_RANK)
    rows["separate devices, rank 0"] = count(script, 0, apart, _LARGE_BUCKET)
    others = [count(script, rank, apart, _LARGE_BUCKET) for rank in {1, last} - {0}]
    rows["separate devices, other ranks, at most"] = max(others, key=lambda counts: counts.received)
    return rows


def table(names: Sequence[str]) -> str:
    lines = [
        "| model: trainer ranks, engine | way | GB received per rank | collectives of a rank | HTTP calls per engine | "
        "MB of their payloads | MB between trainer ranks for payloads |",
        "|---" * 7 + "|",
    ]
    for name in names:
        layout, recipe = read_recipe(SCRIPTS[name]).layout, read_recipe(SCRIPTS[name])
        title = f"{name}: {layout.world} (TP {layout.tp}, PP {layout.pp}, EP {layout.ep}), "
        title += f"{recipe.gpus_per_engine} devices" + f", EP {recipe.expert_blocks}" * (recipe.expert_blocks > 1)
        for way, counts in rows_of(name).items():
            cells = [title, way, f"{counts.received / 1e9:.1f}", str(counts.collectives or "")]
            is_memory = "separate" not in way
            sends = is_memory or "rank 0" in way
            cells += [str(counts.calls) if sends else "0"]
            cells += [f"{size / 1e6:.1f}" if is_memory else "" for size in (counts.text_bytes, counts.handle_bytes)]
            lines.append(f"| {' | '.join(cells)} |")
            title = ""
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(SCRIPTS), default=list(SCRIPTS))
    parser.add_argument("--write", action="store_true", help="replace the table of the page")
    options = parser.parse_args()
    text = table(options.models)
    print(text)
    if options.write:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(with_part("docs/weight_sync.md", page, MARKS, text), encoding="utf-8")


if __name__ == "__main__":
    main()
