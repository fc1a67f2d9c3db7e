"""The lines of a run on the terminal, and the parts of them."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime.data.sample import Sample
from slime.observability import terminal
from slime.observability.console import START, Console, ConsoleArgs, Row, StartTimes, duration, joined
from slime.observability.sample_record import Example
from slime.observability.terminal import NARROW, WIDE, Terminal

METRICS = {"rollout/raw_reward": 0.391, "rollout/response_len/mean": 5.0, "rollout/truncated_ratio": 0.25}
METRICS |= {"rollout/zero_std/count_0.0": 4.0, "rollout/zero_std/count_1.0": 3.0}
STEP = {"loss": -0.0123, "entropy_loss": 0.232, "train_rollout_logprob_abs_diff": 1.4e-7, "grad_norm": 1.18}
SECONDS = {"rollout": 1.1, "train": 61.0}


@dataclass
class Screen(Terminal):
    """A terminal that records its lines."""

    columns: int = WIDE
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    @property
    def width(self) -> int:
        return self.columns

    def line(self, text: str, *, is_error: bool = False) -> None:
        self.lines.append(text)


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def row(rollout_id: int, reward: float = 0.391, **more: Any) -> Row:
    return Row(rollout_id, METRICS | {"rollout/raw_reward": reward}, STEP, SECONDS, num_groups=16, **more)


def console(columns: int = WIDE, rollouts: range = range(30), **settings: Any) -> tuple[Console, Screen, Clock]:
    values: dict[str, Any] = {"eval_datasets": [SimpleNamespace(name="rev")], "eval_interval": 10}
    screen, clock = Screen(columns), Clock()
    if START:  # of another test of this process, which started Ray
        START.pop()
    made = Console(
        ConsoleArgs(**{**values, "n_samples_per_prompt": 4, **settings}), Path("outputs/run"), screen, clock, -61.0
    )
    made.begin(rollouts)
    return made, screen, clock


def cells(screen: Screen, line: int) -> dict[str, str]:
    """Column -> text. Cells end where the titles end."""
    titles = list(re.finditer(r"\S+", screen.lines[0]))
    starts = [0, *(title.end() for title in titles)]
    return {
        title[0]: screen.lines[line][start : title.end()].strip() for title, start in zip(titles, starts, strict=False)
    }


def test_a_line_has_every_number_in_its_column() -> None:
    made, screen, clock = console()
    made.evaluated(0, {"eval/rev": 0.3912, "eval/rev/response_len/mean": 5.0, "eval/weight_version": 0.0})
    clock.now = 9.0
    made.rollout(row(0))
    expected = {"rollout": "0/30", "reward": "0.391", "eval": "0.391", "len": "5.0", "trunc": "25%", "useful": "9/16"}
    expected |= {"entropy": "0.232", "|dlogp|": "1e-07", "grad": "1.18", "gen": "1.1s", "train": "1m01", "ETA": "-"}
    assert cells(screen, 1) == expected


def test_an_evaluation_is_in_the_next_line_only() -> None:
    made, screen, _ = console()
    made.evaluated(0, {"eval/rev": 0.3912})
    made.rollout(row(0))
    made.rollout(row(1))
    assert [cells(screen, line)["eval"] for line in (1, 2)] == ["0.391", ""]


def test_several_sets_and_the_last_evaluation_get_a_line() -> None:
    sets = [SimpleNamespace(name="rev"), SimpleNamespace(name="math")]
    made, screen, _ = console(eval_datasets=sets)
    made.evaluated(10, {"eval/rev": 0.5, "eval/math": 0.25})
    assert screen.lines == ["     eval after 10 rollouts rev 0.500 · math 0.250"]
    made, screen, _ = console()
    made.evaluated(30, {"eval/rev": 0.5})
    assert screen.lines == ["     eval after 30 rollouts rev 0.500"]


@pytest.mark.parametrize("columns", [WIDE, NARROW])
@pytest.mark.parametrize("rollouts", [range(30), range(1_000_000)])
@pytest.mark.parametrize("settings", [{}, {"use_kl_loss": True}, {"loss_type": "sft_loss"}])
def test_no_line_is_wider_than_the_terminal(columns: int, rollouts: range, settings: dict[str, Any]) -> None:
    made, screen, clock = console(columns, rollouts, **settings)
    example = Example("p" * 300, "r" * 300, "l" * 300, 1.0)
    made.evaluated(0, {"eval/rev": -123456.7})
    for number in (0, 1, 2):
        clock.now += 1e5
        made.rollout(row(number, reward=-1234567.8, example=example))
    made.saved({f"outputs/run/{name}": 0.1 for name in ("a" * 30, "b" * 30, "c" * 30)})
    made.finish("finished")
    assert max(map(len, screen.lines)) <= columns
    assert len(screen.lines[1]) == len(screen.lines[0]), "columns stay aligned"


def test_a_narrow_terminal_has_no_seconds() -> None:
    made, screen, _ = console(NARROW)
    made.rollout(row(0))
    assert {"rollout", "reward", "eval", "grad", "ETA"} < set(screen.lines[0].split())
    assert not {"gen", "train"} & set(screen.lines[0].split())


@pytest.mark.parametrize(
    ("settings", "titles"),
    [
        ({"loss_type": "sft_loss", "eval_interval": None}, "rollout loss len grad train ETA"),
        ({"debug_rollout_only": True, "eval_interval": None}, "rollout reward len trunc useful gen ETA"),
        (
            {"advantage_estimator": "ppo", "eval_interval": None},
            "rollout reward len trunc entropy |dlogp| grad gen train ETA",
        ),
        (
            {"use_kl_loss": True, "n_samples_per_prompt": 1, "eval_interval": None},
            "rollout reward len trunc entropy kl |dlogp| grad gen train ETA",
        ),
    ],
)
def test_columns_that_do_not_apply_are_left_out(settings: dict[str, Any], titles: str) -> None:
    made, screen, _ = console(**settings)
    made.rollout(row(0))
    assert screen.lines[0].split() == titles.split()


def test_an_unknown_value_is_a_dash() -> None:
    made, screen, _ = console()
    made.rollout(Row(0, {}, {}, {}))
    assert cells(screen, 1) == dict.fromkeys(cells(screen, 1), "-") | {"rollout": "0/30", "eval": ""}


def test_the_rest_takes_as_long_as_the_last_rollouts_without_the_first() -> None:
    made, screen, clock = console()
    for number, seconds in enumerate((100.0, 2.0, 4.0)):
        clock.now += seconds
        made.rollout(row(number))
    assert [cells(screen, line)["ETA"] for line in (1, 2, 3)] == ["-", "56s", "1m21"]
    clock.now += 21.0
    assert made.progress([("generating 9/16 groups", 12.4)]) == (
        "=> 3/30 [=>              ] generating 9/16 groups · 12 s · ETA 1m00"
    )


def test_a_sample_is_shown_every_thirty_seconds() -> None:
    made, screen, clock = console()
    example = Example("reverse aefd", "dfea", "dfea", 1.0)
    for number in range(40):
        made.rollout(row(number, example=example))
        clock.now += 2.0
    shown = [line for line in screen.lines if "e.g." in line]
    assert shown == ["     e.g. reverse aefd -> dfea  (label dfea, reward 1)"] * 3


@pytest.mark.parametrize(
    ("prompt", "shown"),
    [
        ("<|im_start|>user\nreverse  dfae<|im_end|>\n<|im_start|>assistant\n", "reverse dfae"),
        (
            "<|start_header_id|>user<|end_header_id|>\n\nadd 1<|eot_id|><|start_header_id|>assistant<|end_header_id|>",
            "add 1",
        ),
        ("plain text", "plain text"),
        ([{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}], "hello"),
        ([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is it?"}]}], "what is it?"),
    ],
)
def test_a_sample_shows_the_question_without_its_template(prompt: Any, shown: str) -> None:
    sample = Sample(prompt=prompt, response="yes<|im_end|>", label=None, reward={"score": 1})
    assert Example.of(sample).line(WIDE) == f"e.g. {shown} -> yes  (reward {{'score': 1}})"


def test_a_conversation_of_supervised_training_is_a_question_and_its_answer() -> None:
    turns = [{"role": "user", "content": "12+3="}, {"role": "assistant", "content": "15"}]
    assert Example.of(Sample(prompt=turns, label="15")).line(WIDE) == "e.g. 12+3= -> 15  (label 15)"


def test_the_summary_of_one_rollout_has_one_value() -> None:
    made, screen, _ = console()
    made.rollout(row(0, reward=0.25))
    made.finish("finished")
    assert screen.lines[-2].startswith("finished 1 rollout in 0.0s")
    assert screen.lines[-2].endswith("reward 0.250")


def test_the_summary_has_first_last_and_best_and_where_everything_is() -> None:
    made, screen, clock = console()
    made.evaluated(0, {"eval/rev": 0.3})
    for number, reward in enumerate((0.25, 0.75, 0.5)):
        clock.now += 30
        made.rollout(row(number, reward=reward))
    made.saved({"outputs/run/hf": 0.1})
    made.evaluated(30, {"eval/rev": 0.6})
    del screen.lines[:]
    made.finish("finished")
    assert " ".join(screen.lines).replace(" · ", " ") == (
        "finished 3 rollouts in 1m30 (+1m01 start) eval rev 0.300 -> 0.600, best 0.600 at 30 "
        "reward 0.250 -> 0.500, best 0.750 at 1 outputs/run/hf slime board outputs/run"
    )


def test_the_best_loss_is_the_smallest() -> None:
    made, screen, _ = console(loss_type="sft_loss")
    for number, loss in enumerate((3.0, 1.0, 2.0)):
        made.rollout(Row(number, {}, {"loss": loss}, {}, example=Example("12+3=", "15", None, 0)))
    made.finish("finished")
    assert "     e.g. 12+3= -> 15" in screen.lines, "without a reward"
    assert "loss 3.000 -> 2.000, best 1.000 at 1" in screen.lines[-2]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0s"),
        (9.94, "9.9s"),
        (9.96, "10s"),
        (59.4, "59s"),
        (59.6, "1m00"),
        (3599.6, "1h00"),
        (86399.6, "1d00h"),
        (1e6, "11d13h"),
        (1e10, "99999d"),
    ],
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_parts_that_do_not_fit_continue_in_the_next_line() -> None:
    assert joined(["a" * 6, "b" * 6, "c" * 20, "d"], 15) == ["a" * 6 + " · " + "b" * 6, "c" * 20, "d"]


def test_parts_of_a_start_run_side_by_side() -> None:
    clock = Clock()
    times = StartTimes(clock)
    times.begin("engines", "trainer")
    clock.now = 2.0
    times.end("trainer")
    clock.now = 3.0
    times.end("trainer")
    assert times.pop() == ("starting   engines 3.0s ... · trainer 2.0s", 0.0)
    assert not times


class _Stream(io.StringIO):
    is_tty = True

    def isatty(self) -> bool:
        return self.is_tty


def test_the_line_in_place_is_removed_before_a_line_and_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = _Stream()
    monkeypatch.setattr(terminal.sys, "stdout", stream)
    monkeypatch.setenv("TERM", "xterm")
    screen = Terminal()
    screen.status("half")
    screen.line("whole")
    screen.status("")
    assert stream.getvalue() == "\r\x1b[Khalf\r\x1b[Kwhole\n\r\x1b[Khalf\r\x1b[K"


def test_redirected_output_has_lines_only(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = _Stream()
    stream.is_tty = False
    monkeypatch.setattr(terminal.sys, "stdout", stream)
    screen = Terminal()
    with screen.live(lambda: "never"):
        screen.status("half")
        screen.line("whole")
    assert stream.getvalue() == "whole\n"
    assert screen.width == WIDE
