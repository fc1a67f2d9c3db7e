"""The plan as text: tables at the width of the terminal, colors on a terminal only. Computes nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import IO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from slime.config.parse import terminal_width
from slime.config.plan import BatchPlan, Plan
from slime.config.plan.devices import HostMemory
from slime.config.plan.engine import LINKS, EngineMemory, WeightSync
from slime.config.plan.memory import StageMemory
from slime.config.plan.placement import EngineGroup, Layout, NodePlan, Placement, Turn
from slime.models.cost import num_active, num_parameters
from slime.models.shape import ModelShape

_MAX_NODES = 6
_BAR = 24


def render(plan: Plan, stream: IO[str] | None = None) -> None:
    """Print ``plan`` to ``stream`` (standard output)."""
    stream = stream or sys.stdout
    console = Console(file=stream, width=terminal_width(), highlight=False, no_color=not stream.isatty(), emoji=False)
    console.print(_head(plan))
    sections: list[tuple[str, Iterable[RenderableType]]] = [
        ("Problems", (_bullets(plan.problems, "red"),) if plan.problems else ()),
        ("Missing on this machine", (_bullets(plan.missing),) if plan.missing else ()),
        ("Batch", _batch(plan.batch) if plan.batch else ()),
        ("Processes", _processes(plan, plan.placement, plan.layout) if plan.placement and plan.layout else ()),
        ("Model", _model(plan.shape, plan.padded_vocab, plan.num_trainable) if plan.shape else ()),
        ("Trainer memory, per rank", _trainer(plan)),
        ("Engine memory, per device", _engine(plan.engine, plan) if plan.engine else ()),
        (
            f"Host memory, {'this machine' if plan.is_cpu else 'fullest node'}",
            _host(plan.host, plan) if plan.host else (),
        ),
        ("Weight sync", _sync(plan.sync) if plan.sync else ()),
        ("Turns on shared devices", _turns(plan.turns)),
        ("Written to disk", _outputs(plan)),
        ("Decided for you", _decisions(plan)),
        ("Ignored here", _ignored(plan)),
        ("Not worked out", (_bullets(plan.gaps),) if plan.gaps else ()),
    ]
    for title, parts in sections:
        found = list(parts)
        if found:
            console.print()
            console.print(Text(title, style="bold cyan"))
            for index, part in enumerate(found):
                if index and isinstance(part, Table) and isinstance(found[index - 1], Table):
                    console.print()
                console.print(Padding(part, (0, 0, 0, 2), expand=False))
    console.print()


def _head(plan: Plan) -> Panel:
    facts = []
    if plan.placement:
        place = plan.placement
        nodes = f"{place.num_nodes} node{'s' * (place.num_nodes != 1)}"
        devices = f"device{'s' * (place.num_slots != 1)}"
        facts.append(
            f"{place.num_slots} {devices} = CPU processes" if plan.is_cpu else f"{nodes}, {place.num_slots} {devices}"
        )
        facts.append("colocated" if place.is_colocated else "trainer and engines apart")
    if plan.precision:
        facts.append(plan.precision.name)
    verdict = Text("would start", style="bold green")
    if plan.problems:
        verdict = Text(f"would not start: {len(plan.problems)} problem{'s' * (len(plan.problems) != 1)}", "bold red")
    lines = [Text(" · ".join([plan.title, *facts])), verdict]
    if plan.is_cpu:
        lines.append(Text("for this machine, which has no GPU; --device-memory-gb 80 plans for GPUs of 80 GiB", "dim"))
    body = Group(*lines)
    return Panel(body, title="slime plan", title_align="left", box=box.ROUNDED)


def _batch(batch: BatchPlan) -> Iterable[RenderableType]:
    equal = "=" if batch.is_consistent else "[red]≠[/red]"
    yield Text.from_markup(
        f"[bold]{batch.prompts}[/bold] prompts x [bold]{batch.samples_per_prompt}[/bold] samples = "
        f"[bold]{batch.samples}[/bold] {equal} global batch [bold]{batch.global_batch}[/bold] x "
        f"[bold]{batch.steps}[/bold] step{'s' * (batch.steps != 1)}"
    )
    table = _grid()
    share = f"{batch.samples_per_rank:g} samples per step on each of {batch.dp} data-parallel ranks"
    if batch.micro_batches is not None:
        share += f", as {batch.micro_batches} micro-batches of {batch.micro_batch_size}"
    elif batch.token_budget is not None:
        share += f", in micro-batches of up to {batch.token_budget:,} tokens"
    table.add_row("per rank", share)
    if batch.unique is not None:
        unique, source = batch.unique
        table.add_row("prefixes", f"{unique:.0%} of the tokens pass the trainer with --share-prefixes ({source})")
    if batch.max_response:
        table.add_row("at most", f"{batch.samples * batch.max_response:,} response tokens per rollout")
    if batch.over_sampling > batch.prompts:
        table.add_row("over-sampling", f"{batch.over_sampling} prompts are asked at once, {batch.prompts} are kept")
    for name, path, rows, part in batch.sources:
        size = "" if rows is None else f", {rows:,} rows"
        table.add_row(f"source {name}", f"{part:.1%} of the prompts{size}: {path}")
    table.add_row("run", _run_length(batch))
    yield table


def _run_length(batch: BatchPlan) -> str:
    if batch.num_rollouts is None:
        return batch.run_length
    steps, samples = batch.num_rollouts * batch.steps, batch.num_rollouts * batch.samples
    epochs = ""
    if batch.num_prompts:
        epochs = f", {batch.num_rollouts * batch.prompts / batch.num_prompts:.3g} x the {batch.num_prompts} prompts"
    rollouts = f"{batch.num_rollouts:,} rollout{'s' * (batch.num_rollouts != 1)} ({batch.run_length})"
    return f"{rollouts} = {steps:,} optimizer step{'s' * (steps != 1)}, {samples:,} samples{epochs}"


def _processes(plan: Plan, placement: Placement, layout: Layout) -> Iterable[RenderableType]:
    table = _table("process", "number>", "devices", "what")
    table.add_row("driver", "1", "-", "the loop; holds handles only")
    table.add_row("Data Buffer", "1", "-", "prompts out, partial groups back in")
    if placement.engines:
        table.add_row("rollout manager", "1", "-", "engines, router, rewards, batches")
        table.add_row("router", str(len(placement.routers)), "-", ", ".join(placement.routers))
    for group in placement.engines:
        table.add_row(*_engine_row(group))
    if placement.num_trainer_ranks:
        for role in ("actor", "critic") if placement.has_critic else ("actor",):
            slots = _range((0, placement.num_trainer_ranks - 1))
            table.add_row(f"trainer ({role})", str(placement.num_trainer_ranks), slots, _dimensions(layout))
    yield table
    if not plan.is_cpu:
        yield _node_table(placement)


def _engine_row(group: EngineGroup) -> tuple[str, str, str, str]:
    name = "engine" if group.kind == "regular" else f"engine ({group.kind})"
    width = f"{group.devices_per_engine} device{'s' * (group.devices_per_engine != 1)} each"
    if group.first_slot is None:
        return name, str(group.num_engines), "elsewhere", "not started by this run"
    slots = _range((group.first_slot, group.first_slot + group.num_devices - 1))
    return name, str(group.num_engines), slots, f"{group.model}, {width}"


def _dimensions(layout: Layout) -> str:
    parts = [f"TP {layout.tp}", f"CP {layout.cp}", f"DP {layout.dp}", f"PP {layout.pp}"]
    if layout.vpp > 1:
        parts.append(f"VPP {layout.vpp}")
    text = " x ".join(parts)
    if layout.has_sequence_parallel:
        text += ", sequence parallel"
    if layout.ep > 1:
        text += f"; experts EP {layout.ep} x ETP {layout.etp} x {layout.edp} copies"
    return text


def _node_table(placement: Placement) -> Table:
    nodes = placement.nodes
    names = [name for name in ("tp", "cp", "dp", "pp", "ep") if any(_varies(node, name) for node in nodes)]
    table = _table("node", "devices", "trainer ranks", *(name.upper() for name in names), "engines")
    # Only the first and the last nodes of a large cluster are shown.
    cut = len(nodes) > _MAX_NODES
    for node in nodes[: _MAX_NODES - 2] if cut else nodes:
        table.add_row(*_node_row(node, names))
    if cut:
        table.add_row("...", *[""] * (len(names) + 3))
        for node in nodes[-2:]:
            table.add_row(*_node_row(node, names))
    return table


def _varies(node: NodePlan, name: str) -> bool:
    return node.coordinates.get(name, (0, 0))[1] > 0


def _node_row(node: NodePlan, names: Sequence[str]) -> list[str]:
    return [
        str(node.node),
        _range(node.slots),
        _range(node.ranks) if node.ranks else "-",
        *(_range(node.coordinates[name]) if name in node.coordinates else "-" for name in names),
        ", ".join(node.engines) or "-",
    ]


def _range(ends: tuple[int, int]) -> str:
    return str(ends[0]) if ends[0] == ends[1] else f"{ends[0]}-{ends[1]}"


def _model(shape: ModelShape, padded_vocab: int, num_trainable: int) -> Iterable[RenderableType]:
    table = _grid()
    active = f", {count(num_active(shape))} active per token" if shape.moe else ""
    total = num_parameters(shape)
    table.add_row("parameters", f"[bold]{count(total)}[/bold] ({total:,}){active}")
    if num_trainable:
        table.add_row("adapters", f"{count(num_trainable)} ({num_trainable:,}), and nothing else is trained")
    heads = f"{shape.num_attention_heads} heads, {shape.num_query_groups} key/value heads of {shape.head_dim}"
    if shape.mla:
        latent = f"keys and values in {shape.mla.kv_lora_rank} numbers"
        heads = f"{shape.num_attention_heads} heads, latent attention ({latent})"
    kind = shape.model_type if shape.model_type != "unknown" else "shape from flags"
    table.add_row("shape", f"{kind}: {shape.num_layers} layers x {shape.hidden_size}, {heads}")
    if shape.delta_net:
        delta, layers = shape.delta_net, sum(shape.delta_net.layers)
        table.add_row(
            "gated delta nets", f"in {layers} layers, {delta.num_key_heads} key and {delta.num_value_heads} value heads"
        )
    if shape.moe:
        moe, layers = shape.moe, sum(shape.moe.layers)
        shared = f", shared expert of {moe.shared_size}" if moe.shared_size else ""
        table.add_row(
            "experts",
            f"{moe.num_experts} of {moe.ffn_hidden_size}, {moe.topk} per token, in {layers} layers{shared}",
        )
    tied = "tied to the output layer" if shape.is_tied else "separate output layer"
    table.add_row("vocabulary", f"{shape.vocab_size:,} (padded to {padded_vocab:,}), {tied}")
    if shape.num_mtp_layers:
        table.add_row("MTP", f"{shape.num_mtp_layers} multi-token-prediction layers, counted above")
    yield table


def _trainer(plan: Plan) -> Iterable[RenderableType]:
    if not plan.stages or plan.tokens is None:
        return
    groups = _similar(plan.stages)
    table = _table("", *(f"{_stage_name(group, len(plan.stages))}>" for group in groups))
    table.add_row("parameters", *(count(group[0].parameters) for group in groups))
    if any(group[0].trained for group in groups):
        table.add_row("trainable", *(count(group[0].trained) for group in groups))
    for name in ("weights", "gradients", "optimizer", "activations", "logits"):
        table.add_row(name, *(size(getattr(group[0], name)) for group in groups))
    table.add_row("[bold]total[/bold]", *(f"[bold]{size(group[0].total)}[/bold]" for group in groups))
    if any(group[0].without_adapters for group in groups):
        table.add_row("without adapters", *(size(group[0].without_adapters) for group in groups))
    table.add_row("micro-batches alive", *(str(group[0].in_flight) for group in groups))
    yield table
    if not plan.is_cpu:
        yield _bar(max(stage.total for stage in plan.stages), plan.device_bytes)
    notes = f"activations of {plan.tokens.count:,} tokens per micro-batch ({plan.tokens.source})"
    gathered = max(stage.gathered_keys for stage in plan.stages)
    if gathered:
        notes += f", {size(gathered)} of it keys and values of other context-parallel ranks"
    yield Text(notes, style="dim")
    if plan.placement and plan.placement.has_critic:
        of_actor = "without adapters" if plan.num_trainable else "of the same size"
        yield Text(f"the critic's model and states are {of_actor} and not counted", style="dim")
    if not plan.is_cpu:
        yield Text("not counted: CUDA context, NCCL buffers, fragmentation", style="dim")


def _host(host: HostMemory, plan: Plan) -> Iterable[RenderableType]:
    if plan.is_cpu:
        trainer = f"{size(host.trainer)} in {host.ranks} rank{'s' * (host.ranks != 1)}, without activations"
        yield _grid(("trainer", trainer), ("engines", size(host.engines)), ("processes", size(host.processes)))
        yield _bar(host.total, plan.host_bytes)
    elif host.total:
        yield _grid(
            (
                "copies",
                f"{size(host.copies)} of weights, pinned, for {host.ranks} trainer rank{'s' * (host.ranks != 1)}",
            ),
            ("optimizer", size(host.states)),
            ("a save", f"{size(host.save)} of buffers, and nothing on the device"),
        )
        yield _bar(host.total, plan.host_bytes)
        yield Text("not counted: the processes, Ray's object store, the page cache", style="dim")


def _similar(stages: Sequence[StageMemory]) -> list[list[StageMemory]]:
    """Group neighboring stages of the same memory into one column, shown by its largest stage."""
    # Activations shrink from stage to stage, so the key must not contain them.
    groups = [list(group) for _, group in groupby(stages, key=lambda stage: (stage.parameters, stage.logits))]
    return [sorted(group, key=lambda stage: -stage.total) for group in groups]


def _stage_name(group: Sequence[StageMemory], num_stages: int) -> str:
    if num_stages == 1:
        return f"all {group[0].layers[1] + 1} layers"
    ends = (min(stage.stage for stage in group), max(stage.stage for stage in group))
    layers = group[0].layers[1] - group[0].layers[0] + 1
    return f"stage{'s' * (len(group) > 1)} {_range(ends)} ({layers} layer{'s' * (layers != 1)})"


def _engine(engine: EngineMemory, plan: Plan) -> Iterable[RenderableType]:
    table = _grid()
    table.add_row("weights", f"{size(engine.weights)} (TP {engine.tp}{f' x PP {engine.pp}' if engine.pp > 1 else ''})")
    device_bytes = plan.device_bytes
    if not plan.is_cpu:
        assumed = ", assumed: SGLang decides" if engine.is_fraction_assumed else ""
        table.add_row("static memory", f"{engine.fraction:g} of {size(device_bytes)}{assumed}")
    table.add_row("KV cache", f"{size(engine.pool)} at {engine.kv_per_token:,} bytes per token")
    if engine.tokens == 0:
        table.add_row("", "[red]the weights alone exceed the static memory[/red]")
    else:
        table.add_row(
            "engine holds", f"{engine.tokens:,} tokens = {engine.sequences:,} sequences of {engine.max_length:,}"
        )
    yield table
    if not plan.is_cpu:
        yield _bar(min(engine.weights + engine.pool, max(engine.weights, device_bytes)), device_bytes)


def _sync(sync: WeightSync) -> Iterable[RenderableType]:
    buckets = f"{sync.buckets} bucket{'s' * (sync.buckets != 1)} of up to {size(sync.buffer_bytes)}"
    often = "after every rollout" if sync.interval == 1 else f"after every {sync.interval} rollouts"
    total = 0 if sync.num_syncs is None else sync.bytes * sync.num_syncs + sync.base_bytes
    summed = f"; {sync.num_syncs:,} syncs, {size(total)} in all" if total else ""
    each = f"of adapters, and {size(sync.base_bytes)} once, in {buckets}" if sync.base_bytes else f"in {buckets}"
    yield _grid(
        ("each", f"[bold]{size(sync.bytes)}[/bold] {each}"),
        ("when", f"before the first rollout and {often}{summed}"),
        ("how", f"{sync.mode}, {sync.transport}"),
        *_links(sync),
    )


def _links(sync: WeightSync) -> Iterator[tuple[str, str]]:
    parts = [
        f"{size(amount)} by {link} ({LINKS[link] / 1e9:g} GB/s)" for link, amount in sync.received.items() if amount
    ]
    if parts:
        yield "per device", f"receives {' and '.join(parts)}: at least {sync.seconds:.3g} s, without copies and loading"


def _turns(turns: Sequence[Turn]) -> Iterable[RenderableType]:
    if turns:
        yield _table("turn", "engines hold", "trainer holds", rows=((t.name, t.engines, t.trainer) for t in turns))


def _outputs(plan: Plan) -> Iterable[RenderableType]:
    table = _table("what", "where", "when", "size>")
    for output in plan.outputs:
        amount = "" if output.bytes is None else size(output.bytes)
        # Square brackets in a path would be read as markup.
        table.add_row(output.what, escape(_short(output.where)), output.when, amount)
    yield table


def _short(path: str) -> str:
    """Relative to the working directory if it is inside."""
    return os.path.relpath(path) if path.startswith(os.getcwd() + os.sep) else path


def _decisions(plan: Plan) -> Iterable[RenderableType]:
    if plan.notices:
        styles = {"warning": "yellow", "info": "dim"}
        flags = (f"[{styles[notice.level]}]{escape(notice.flag)}[/{styles[notice.level]}]" for notice in plan.notices)
        yield _grid(*((flag, escape(notice.text)) for flag, notice in zip(flags, plan.notices, strict=True)))


def _ignored(plan: Plan) -> Iterable[RenderableType]:
    if plan.ignored:
        yield _grid(*((flag, escape(why)) for flag, why in plan.ignored))


def _bullets(lines: Sequence[str], style: str = "yellow") -> Table:
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(width=1, style=style)
    table.add_column(overflow="fold")
    for line in lines:
        table.add_row("-", escape(line))
    return table


def _bar(used: int, total: int) -> Text:
    """``[======......] 40 of 80 GiB``, red above the device."""
    share = used / total
    style = "green" if share <= 0.9 else "yellow" if share <= 1 else "bold red"
    filled = min(_BAR, round(share * _BAR))
    text = Text()
    text.append("█" * filled, style=style)
    text.append("░" * (_BAR - filled), style="dim")
    text.append(f" {size(used)} of {size(total)} ({share:.0%})", style=style)
    if share > 1:
        text.append(" does not fit", style=style)
    return text


def _grid(*rows: tuple[str, str]) -> Table:
    """Names and values, without a header."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(min_width=13, style="dim")
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _table(*headers: str, rows: Iterable[Sequence[str]] = ()) -> Table:
    """A table. A header that ends in ``>`` aligns its column to the right."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, header_style="dim")
    for header in headers:
        right = header.endswith(">")
        table.add_column(header.rstrip(">"), justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


# ---- readable numbers


def size(num_bytes: int) -> str:
    """``1610612736`` -> ``1.5 GiB``: three significant digits, binary units."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        # From 999.5 on three digits would round to 1000.
        if value < 999.5 or unit == "PiB":
            return f"{value:.0f} {unit}" if unit == "B" or value >= 99.5 else f"{value:.3g} {unit}"
        value /= 1024
    raise AssertionError("the last unit takes everything")


def count(number: int) -> str:
    """``4022468096`` -> ``4.02 B``: thousand, million, billion."""
    value = float(number)
    for unit in ("", " K", " M", " B"):
        if value < 999.5 or unit == " B":
            return f"{value:.0f}{unit}" if not unit or value >= 99.5 else f"{value:.3g}{unit}"
        value /= 1000
    raise AssertionError("the last unit takes everything")
