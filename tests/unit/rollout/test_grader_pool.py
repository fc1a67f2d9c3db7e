"""Model output cannot stop the run: hostile answers are graded in processes that the kernel ends."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from slime.data.sample import Sample
from slime.observability.rollout_metrics import compute_metrics_from_samples
from slime.rollout.rm_hub import (
    async_rm,
    batched_async_rm,
    compute_gpqa_reward,
    compute_score_dapo,
    f1_score,
    get_deepscaler_rule_based_reward,
    grade_answer_verl,
    grader_pool,
)
from slime.rollout.rm_hub.grader_pool import grade_in_process, grade_limit
from slime.rollout.rm_hub.rules import grade_math_verify
from slime.utils import process as process_module
from slime.utils.errors import DataError, ScoringError

BOMB = r"\boxed{9^{9^{9^9}}}"
"""math-verify computes it, but ``--rm-type math`` refuses it."""
ALGEBRA = r"\boxed{2\sqrt{3}}", r"\sqrt{12}"


@pytest.fixture
def fresh_pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A pool that the test may break, and that sees its settings."""
    monkeypatch.setattr(grader_pool, "_current", None)
    yield
    if grader_pool._current is not None:
        grader_pool._current.close()


def grade_bomb() -> None:
    with grade_limit(600):
        grade_math_verify(BOMB, "7")


def pool_processes() -> list[psutil.Process]:
    assert grader_pool._current is not None
    first = psutil.Process(grader_pool._current.pid)
    return [first, *first.children()]


def rm_args(rm_type: str, rm_timeout: float = 60.0) -> SimpleNamespace:
    return SimpleNamespace(rm_type=rm_type, rm_timeout=rm_timeout)


def test_a_number_in_pythons_notation_has_no_grade():
    """``9^0xfffffff`` passed the check of exponents, and sympy computed it in the rollout manager."""
    assert asyncio.run(async_rm(rm_args("math"), Sample(response=r"\boxed{9^0xfffffff}", label="7"))) == 0
    assert not grade_answer_verl(r"\boxed{9^9_999_999_999}", "7")


@pytest.mark.parametrize(
    "bomb",
    [
        *("99999999!", "(9*9*9*9*9*9*9)!", "9!!!!", "(" * 12 + "9" + ")^9" * 12, "9^0xfffffff", "9^1_000_000_000"),
        *("9**9**9", "99999999**99999999", "9^9!^9", "9^-9^9", "((((999!^9)^9)^9)^9)^9", "2^sqrt(9999999999999999)"),
        *("ff(999999999,9999999)", "1<<99999999999", "'9'*99999999999", "[9]*9999999999", "sqrt(2).n(9999999)"),
    ],
)
def test_expressions_that_would_keep_sympy_busy_are_refused_before_they_are_computed(bomb: str):
    with grade_limit(60) as limit:
        assert not grade_answer_verl(rf"\boxed{{{bomb}}}", "x")
    assert limit.stopped is None


@pytest.mark.parametrize("response", [BOMB, r"\boxed{" * 140_000], ids=["bomb", "boxes"])
def test_an_answer_that_takes_too_long_counts_as_wrong_and_the_next_one_is_graded(
    monkeypatch: pytest.MonkeyPatch, response: str
):
    monkeypatch.setattr(grader_pool, "_MAX_CPU_S", 0.5)
    with grade_limit(60) as limit:
        assert grade_math_verify(response, "7") == 0.0
    assert (limit.stopped is not None) == (response == BOMB)
    assert grade_math_verify(r"\boxed{7}", "7") == 1.0


def test_rm_timeout_ends_an_answer_that_waits_without_computing(fresh_pool: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grader_pool, "_MAX_CPU_S", 1000.0)
    sample = Sample(response=BOMB, label="7", metadata={})
    assert asyncio.run(async_rm(rm_args("math_verify", rm_timeout=0.5), sample)) == 0.0
    assert sample.metadata == {"grading_stopped": "it took longer than an answer may"}


def test_answers_without_a_grade_are_counted():
    samples = [Sample(metadata={"grading_stopped": "x"}), Sample(metadata={})]
    args = SimpleNamespace(advantage_estimator="ppo", log_reward_category=None)
    assert compute_metrics_from_samples(args, samples, [1, 1])["ungraded_answers"] == 1
    assert "ungraded_answers" not in compute_metrics_from_samples(args, samples[1:], [1])


def test_an_answer_that_wants_too_much_memory_counts_as_wrong(fresh_pool: None):
    # Each answer goes to the process that has been free for longest, so all have set their limits after this.
    assert all(grade_math_verify("$7$", "7") == 1.0 for _ in range(grader_pool._num_processes()))
    for fork in pool_processes()[1:]:
        assert 2 * 2**30 < fork.rlimit(psutil.RLIMIT_AS)[0] < fork.memory_info().vms + 2 * 2**30 + 2**22
        allowed = fork.memory_info().vms + 2**22
        fork.rlimit(psutil.RLIMIT_AS, (allowed, allowed))
    assert grade_math_verify("$9^{9^8}$", "7") == 0.0
    assert grade_math_verify("$7$", "7") == 1.0


def test_addresses_that_libraries_reserve_do_not_count_as_memory_of_an_answer(
    fresh_pool: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    reserve = "import mmap\nkept = mmap.mmap(-1, 4 * 2**30, flags=mmap.MAP_PRIVATE | 0x4000, prot=mmap.PROT_READ)"
    (tmp_path / "sitecustomize.py").write_text(reserve, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with grade_limit(60) as limit:
        assert grade_answer_verl(*ALGEBRA), limit.stopped
    assert pool_processes()[0].memory_info().vms > 4 * 2**30


@pytest.mark.parametrize(("quota", "count"), [("max 100000", 32), ("250000 100000", 2), ("1600000 100000", 8)])
def test_a_container_has_as_many_processes_as_its_share_of_the_cpus_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, count: int
):
    (tmp_path / "cpu.max").write_text(f"{quota}\n", encoding="ascii")
    monkeypatch.setattr(process_module, "_CPU_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(192)))
    assert grader_pool._num_processes() == count


def test_one_stuck_answer_does_not_delay_the_others(fresh_pool: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grader_pool, "_num_processes", lambda: 2)
    monkeypatch.setattr(grader_pool, "_MAX_CPU_S", 1000.0)
    assert grade_math_verify(r"\boxed{7}", "7") == 1.0
    stuck = threading.Thread(target=grade_bomb, daemon=True)
    stuck.start()
    assert [grade_answer_verl(*ALGEBRA) for _ in range(20)] == [True] * 20
    assert stuck.is_alive()
    for process in pool_processes()[1:]:
        process.kill()
    stuck.join(30)
    assert not stuck.is_alive()


def test_waiting_for_a_free_process_does_not_count_as_grading(fresh_pool: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grader_pool, "_num_processes", lambda: 1)
    monkeypatch.setattr(grader_pool, "_MAX_CPU_S", 1.0)
    samples = [Sample(response=BOMB, label="7"), Sample(response=BOMB, label="7"), Sample(response="$7$", label="7")]
    assert asyncio.run(batched_async_rm(rm_args("math_verify"), samples)) == [0.0, 0.0, 1.0]


def test_a_response_that_finds_no_free_process_is_a_failure_and_no_zero(
    fresh_pool: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(grader_pool, "_WAIT_S", 0.0)
    monkeypatch.setattr(grader_pool, "_num_processes", lambda: 0)
    with pytest.raises(ScoringError, match="grader processes was free for 0 s"):
        asyncio.run(async_rm(rm_args("math_verify"), Sample(response=r"\boxed{7}", label="7")))


def test_processes_that_were_ended_fail_one_answer_and_are_started_again(fresh_pool: None):
    assert grade_answer_verl(*ALGEBRA)
    for process in pool_processes():
        process.kill()
    with pytest.raises(ScoringError, match=r"grader sympy: .*the next answer starts new ones"):
        grade_answer_verl(*ALGEBRA)
    assert grade_answer_verl(*ALGEBRA)


def test_answers_whose_processes_end_at_the_same_time_fail_with_that_reason(
    fresh_pool: None, monkeypatch: pytest.MonkeyPatch
):
    """Each of their threads ends the same pool."""
    monkeypatch.setattr(grader_pool, "_num_processes", lambda: 8)
    monkeypatch.setattr(grader_pool, "_MAX_CPU_S", 1000.0)
    assert grade_answer_verl(*ALGEBRA)
    with ThreadPoolExecutor(8) as threads:
        graded = [threads.submit(grade_bomb) for _ in range(8)]
        pool = grader_pool._current
        assert pool is not None
        while not pool._free.empty() or len(pool_processes()) < 9:  # a fork that comes later would grade to its limit
            time.sleep(0.01)
        for process in pool_processes():
            process.kill()
    assert all("the next answer starts new ones" in str(one.exception()) for one in graded)


def test_a_fork_of_this_process_gets_graders_of_its_own(fresh_pool: None):
    assert grade_answer_verl(*ALGEBRA)
    mine = grader_pool._pool()
    pid = os.fork()
    if pid == 0:
        os._exit(0 if grader_pool._pool() is not mine else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_library_that_is_missing_ends_the_run(fresh_pool: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("SLIME_IFBENCH_DIR", raising=False)
    sample = Sample(response="text", metadata={"instruction_id_list": ["x"]})
    with pytest.raises(DataError, match=r"grader ifbench: ImportError: .*SLIME_IFBENCH_DIR") as caught:
        asyncio.run(async_rm(rm_args("ifbench"), sample))
    assert not isinstance(caught.value, ScoringError)


_PARENT = """
import sys, threading, time
from slime.rollout.rm_hub import grader_pool
from slime.rollout.rm_hub.rules import grade_math_verify
grader_pool._MAX_CPU_S = 1000.0
assert grade_math_verify("$7$", "7") == 1.0
def grade_bomb():
    with grader_pool.grade_limit(600):
        grade_math_verify(sys.argv[1], "7")
threading.Thread(target=grade_bomb, daemon=True).start()
print(grader_pool._current.pid, "torch" in sys.modules, flush=True)
time.sleep(600)
"""


def test_the_processes_end_with_their_parent_though_it_is_killed_and_one_is_busy():
    parent = subprocess.Popen([sys.executable, "-c", _PARENT, BOMB], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid, has_torch = parent.stdout.readline().split()
    assert has_torch == "False"
    first = psutil.Process(int(pid))
    everyone = [first, *first.children()]
    while not any(fork.cpu_times().user > 0.3 for fork in everyone[1:]):
        time.sleep(0.05)
    assert not any("torch" in (opened.path or "") for opened in first.memory_maps())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    _, alive = psutil.wait_procs(everyone, timeout=60)
    assert not alive


# --- fuzzing

_ATOMS = (
    *("9", "0", "x", "e", "7", "10^{9}", "0xfffffff", "1e308", "9e999999999", "1_000_000", "999!", "9^9", "\\pi", "i"),
    *("\\sqrt{2}", "\\frac{1}{3}", "\\frac", "\\sqrt", "\\text{cm}", "\\infty", "\\left(", "\\right)", "\\begin{a}"),
    *(
        "\\boxed{",
        "}",
        "{",
        "$",
        "\\\\",
        "\\",
        "%",
        "٣",
        "½",
        "\u200b",
        "\ud800",
        "\U0001d7d7",
        "\0",
        "∞",
        "million",
        "lambda",
    ),
    *(
        "__import__('os')",
        "[x for x in (1,)]",
        "f'{x}'",
        "nan",
        "-",
        "+",
        ",",
        "(",
        ")",
        "!",
        "!!",
        "^",
        "**",
        "//",
        "<<",
    ),
)
_SHAPES = (
    lambda rng, a: a * rng.randint(1, 3000),
    lambda rng, a: "(" * rng.randint(1, 400) + a + ")" * rng.randint(1, 400),
    lambda rng, a: "{" * rng.randint(1, 1000) + a + "}" * rng.randint(1, 1000),
    lambda rng, a: "^".join([a] * rng.randint(2, 40)),
    lambda rng, a: "".join(rng.choices(_ATOMS, k=rng.randint(1, 60))),
    lambda rng, a: "\\frac{" * rng.randint(1, 300) + a + "}{9}" * rng.randint(1, 300),
    lambda rng, a: str(rng.getrandbits(rng.choice((8, 64, 3000, 12_000)))),
    lambda rng, a: f"{a}^{rng.randint(2, 9)}!+{rng.randint(1, 999)}!",
    lambda rng, a: "answer" + rng.choice((" ", "(", "\\boxed{", "( *")) * rng.randint(1, 5000) + a,
    lambda rng, a: "-" * rng.randint(1, 2000) + a,
    lambda rng, a: ",".join([a] * rng.randint(1, 500)),
)
_RIGHT = (
    *(("42", "42"), ("42.0", "42"), ("1,234", "1234"), (r"\frac12", "0.5"), ("(1, 2)", "(1,2)"), ("x=5", "5")),
    *((r"2\sqrt{3}", r"\sqrt{12}"), ("(x+1)^2", "x^2+2x+1"), ("1+x", "x+1"), ("7 3/4", "31/4")),
)
_WRONG = (
    ("41", "42"),
    (r"\frac{2}{4}", r"\frac{1}{2}"),
    ("(2,1)", "(1,2)"),
    ("x^2", "y^2"),
    (r"\sqrt{11}", r"\sqrt{12}"),
)


def _hostile(rng: random.Random) -> str:
    text = rng.choice(_SHAPES)(rng, rng.choice(_ATOMS))
    return rng.choice((rf"\boxed{{{text}}}", rf"</think> \boxed{{{text}}}", rf"Answer: ${text}$ \boxed{{{text}", text))


def _grade_with_every_rule(response: str, label: str) -> list[Any]:
    is_thought = "</think>" in response
    return [
        get_deepscaler_rule_based_reward(response, label) if is_thought else grade_answer_verl(response, label),
        compute_score_dapo(response, label)["score"],
        compute_score_dapo(response, label, strict_box_verify=True)["score"],
        compute_gpqa_reward(response, label, {"choices": ["7", "8"]}),
        f1_score(response, label)[0],
    ]


@pytest.mark.timeout(1200)  # 20 s of CPU time, and as many waits for another process as there are hostile answers
def test_thousands_of_hostile_answers_cost_bounded_time_and_memory_and_right_answers_stay_right(
    fresh_pool: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(grader_pool, "_MAX_CPU_S", 1.0)
    rng = random.Random(12)
    slowest, most_bytes = 0.0, 0
    for number in range(2_500):
        if number % 10 == 0:
            given, label = rng.choice(_RIGHT)
            assert grade_answer_verl(rf"\boxed{{{_hostile(rng)}}} so \boxed{{{given}}}", label), (given, label)
            given, label = rng.choice(_WRONG)
            assert not grade_answer_verl(rf"\boxed{{{given}}}", label), (given, label)
            continue
        response = _hostile(rng)
        started = time.thread_time()  # CPU time of this process: what blocks the rollout manager
        rewards = _grade_with_every_rule(response, "7")
        slowest = max(slowest, time.thread_time() - started)
        assert all(-1 <= reward <= 1 for reward in rewards)
        if number % 125 == 1:
            most_bytes = max(most_bytes, *(fork.memory_info().rss for fork in pool_processes()))
            assert grade_math_verify(response, "7") in (0.0, 1.0)
    assert slowest < 0.5
    assert most_bytes < 2 * 2**30


def test_the_grader_survives_what_its_callers_would_not_let_through(fresh_pool: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grader_pool, "_MAX_CPU_S", 0.2)
    rng = random.Random(3)
    for _ in range(50):
        assert grade_in_process("sympy", [_hostile(rng), "7"]) in (None, True, False)
