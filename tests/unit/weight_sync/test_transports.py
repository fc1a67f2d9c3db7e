"""The table of transports: a new row works without a change of other files."""

from __future__ import annotations

import io
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime.backends import EngineFleet, WeightExporter
from slime.config.arguments import SyncArgs
from slime.config.groups import RunConfig
from slime.config.parse import build_parser
from slime.config.plan import build
from slime.config.plan.render import render
from slime.ray.arguments import GROUPS
from slime.ray.weight_updater import weight_updater
from slime.weight_sync import TRANSPORTS, TrainerSide, Transport, rules
from slime.weight_sync.session import WeightUpdate
from tests.unit.config.tiny_command import TinyCommand, make_command


class Pigeons:
    """A toy updater."""

    changed_share = None

    def __init__(self, sync: SyncArgs, side: TrainerSide) -> None:
        self.timeout_s, self.ranks = sync.weight_sync_timeout, side.ranks

    def update(self, fleet: EngineFleet, trainer: WeightExporter, update: WeightUpdate) -> int:
        return 1

    def disconnect(self) -> None:
        pass


def check_pigeons(args: Namespace) -> Iterator[str]:
    if args.colocate:
        yield "--update-weight-transport pigeons does not work with --colocate: pigeons need a distance."


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TinyCommand:
    row = Transport(make=Pigeons, reads=("update_weight_buffer_size",), check=check_pigeons)
    monkeypatch.setitem(TRANSPORTS, "pigeons", row)
    return make_command(tmp_path)


def test_the_flag_offers_every_row(command: TinyCommand) -> None:
    action = build_parser(GROUPS)._option_string_actions["--update-weight-transport"]
    assert tuple(action.choices or ()) == ("nccl", "disk", "pigeons") == tuple(TRANSPORTS)


def test_a_row_is_chosen_planned_and_checked(command: TinyCommand) -> None:
    args = command.resolve()
    args.update_weight_transport = "pigeons"
    args.rank = 0
    updater = weight_updater(RunConfig.of(args), 1, 2)
    assert isinstance(updater, Pigeons)
    assert (updater.timeout_s, updater.ranks.rank, updater.ranks.size) == (args.weight_sync_timeout, 1, 2)
    stream = io.StringIO()
    render(build(args, title="", device_bytes=1), stream)
    assert "full, pigeons" in stream.getvalue()
    args.colocate = True
    assert [problem for rule in rules.RULES for problem in rule(args) if "pigeons" in problem] == list(
        check_pigeons(args)
    )


def test_flags_of_a_row_are_idle_with_the_other_transports(command: TinyCommand) -> None:
    idle = "--update-weight-buffer-size: no effect: only --update-weight-transport pigeons reads it"
    assert idle in command.warnings("--update-weight-buffer-size", 1024)
