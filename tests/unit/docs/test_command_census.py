"""Every documented command is executed by a test, or its page names a requirement that the tests lack."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from typing import get_args

import pytest

from tests.doc_commands import (
    PAGES,
    ROOT,
    RUNS,
    Command,
    Executed,
    blocks,
    census,
    commands,
    commands_of_page,
    shown_flags,
)

FOR_A_CPU = re.compile(r" --(help|plan|dry-run)\b|^slime (plan|doctor|board|replay) |-m slime\.testing|run_tiny\.py")
"""Commands that need nothing but a CPU: no page may name a further requirement, except a container or a cluster."""
PROGRAMS = re.compile(
    r"^(\$ |(\w+=\S+ )*(python3?|slime|make|bash|source|export|ray|docker|pip|git|hf|curl|torchrun) \S)"
)


def test_every_command_has_one_who_executes_it_or_a_mark() -> None:
    classes = census()
    assert Counter(classes.values()).keys() == set(get_args(Executed))
    assert len(classes) > 150


def test_a_run_takes_its_command_from_the_page_or_has_all_of_its_flags() -> None:
    for (page, words), file in RUNS.items():
        text = (ROOT / file).read_text(encoding="utf-8")
        if f'"{page}", "{words}"' not in text:
            [command] = [line for line in commands_of_page(ROOT / page) if words in line.text]
            missing = [word for word in shlex.split(command.text) if word.startswith("--") and word not in text]
            assert missing == [], f"{file} does not run `{command.text}` of {page}: it has no {missing}"
            assert words.split()[-1] in text, f"{file} does not run `{command.text}` of {page}"


def test_what_a_cpu_can_do_needs_nothing_more() -> None:
    marked = [command for command, executed in census().items() if executed == "marked"]
    first_of_block = {(c.page, c.block): c for c in reversed(marked)}
    wrong = [
        command.text
        for command in marked
        if FOR_A_CPU.search(command.text)
        and "pip install" not in command.text  # its dry run asks the package index
        and not first_of_block[command.page, command.block].text.startswith(("docker run", "ray start"))
    ]
    assert wrong == []


def test_no_block_hides_its_commands_from_the_census() -> None:
    hidden = {}
    for page in PAGES:
        for language in ("", "sh", "shell", "console", "text"):
            lines = [line for code in blocks(page, language) for line in code.splitlines()]
            if found := [line for line in lines if PROGRAMS.match(line) and "[" not in line]:
                hidden[str(page.relative_to(ROOT))] = found
    assert hidden == {}


def test_make_demo_is_the_command_of_its_page() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    [recipe] = re.findall(r"^demo:.*\n\t\S+/(python .*)$", makefile, re.MULTILINE)
    assert [command.text for command in commands_of_page(ROOT / "examples" / "demo" / "README.md")] == [recipe]


@pytest.mark.parametrize(
    ("block", "needs"),
    [
        ("python a.py --x 1   # a remark\n", [""]),
        ("python a.py \\\n    --x 1   # needs a GPU\nslime plan x\n", ["a GPU", ""]),
        ("# needs a cluster\nray start\nray job\n", ["a cluster", "a cluster"]),
        ("# first\nmake demo\n", [""]),
    ],
)
def test_a_mark_is_about_its_command_or_the_whole_block(block: str, needs: list[str], monkeypatch, tmp_path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"```bash\n{block}```\n")
    monkeypatch.setattr("tests.doc_commands.ROOT", tmp_path)
    found = commands_of_page(page)
    assert [command.needs for command in found] == needs
    assert [command.text for command in found] == commands(block)
    assert all(isinstance(command, Command) and "#" not in command.text for command in found)


def test_flags_that_a_run_takes_from_a_page_are_those_behind_its_program() -> None:
    assert shown_flags("docs/fsdp.md", "--train-backend fsdp")[:2] == ["--train-backend", "fsdp"]
    with pytest.raises(ValueError, match="not enough values"):
        shown_flags("docs/fsdp.md", "--no-such-words")
