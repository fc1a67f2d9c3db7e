"""Commands that are not executed literally are parsed: programs and files exist, train commands would start.

This includes commands without a test, because the page names a requirement. Of their train commands every
flag must exist, of all others the files. ``...`` in a command means the flags of a run that works.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from slime.backends.sglang_utils.namespace import read_engine
from slime.cli import main as main_of_slime
from slime.cli import read_command
from slime.config.parse import parse
from slime.observability.metric_table import describe
from slime.ray.arguments import GROUPS, parse_only
from tests.doc_commands import PAGES as ALL_PAGES
from tests.doc_commands import ROOT, blocks, census, commands_of_page, make_model
from tests.programs import run_program
from tests.unit.docs.readers_place import add_missing_flags
from tests.unit.scripts.bash_arrays import model_words

PAGES = [page for page in ALL_PAGES if "examples" not in page.parts]
"""Those of the examples are read in ``tests/examples/test_readmes.py``."""
OF_OTHERS = ("gym", "ray", "docker", "ssh", "hf", "torchrun")
"""Programs that only commands with a mark may call."""
EVERYWHERE = ("cd", "cp", "curl", "export", "git", "pip", "python3.12", "tensorboard")
_OPERATORS = re.compile(r"\s(?:&&|\||>|&)(?=\s|$)")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def all_commands() -> list[tuple[str, str, bool]]:
    """(page, command, whether it is for another machine), from blocks and from code inside sentences.

    Without those of ``test_shown_commands_run``, which is the stronger test.
    """
    found, executed = [], census()
    for page in PAGES:
        for command in (command for command in commands_of_page(page) if executed[command] != "here"):
            parts = [part.strip() for part in _OPERATORS.split(command.text) if part.strip()]
            found += [(name_of(page), part, bool(command.needs)) for part in parts]
        text = _FENCE.sub("", page.read_text(encoding="utf-8"))
        inline = re.findall(r"`((?:python3?|slime|make|bash|source) [^`]+)`", text)
        found += [(name_of(page), re.sub(r"\s+", " ", line), True) for line in inline]
    return found


@pytest.fixture(scope="module")
def readers_place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the files that a reader would have."""
    place = tmp_path_factory.mktemp("reader")
    for name in ("examples", "scripts", "tools"):
        (place / name).symlink_to(ROOT / name)
    make_model(place / "model")
    row = {"prompt": [{"role": "user", "content": "q"}], "input": "q", "label": "1", "images": []}
    (place / "prompts.jsonl").write_text((json.dumps(row) + "\n") * 64)
    (place / "roles.yaml").write_text("megatron: [{name: default, role: critic, overrides: {lr: 1e-5}}]\n")
    [reward] = [
        code for code in blocks(ROOT / "docs/en/get_started/quick_start.md", "python") if "def reward_func" in code
    ]
    (place / "my_reward.py").write_text(reward)
    return place


def placed(word: str, place: Path) -> str:
    """A page's path as one of the reader's place."""
    path, _, rows = word.partition("@")
    if word in ("MODEL", "Qwen3-4B") or (
        path.startswith(("/models/", "/tmp/tiny/model")) and not path.endswith(".jsonl")
    ):
        return str(place / "model")
    if path == "FILE" or path.endswith((".jsonl", ".parquet")):
        return str(place / "prompts.jsonl") + (f"@{rows}" if rows else "")
    return word


def train_words(line: str, place: Path) -> list[str]:
    line = line.replace('"${MODEL_ARGS[@]}"', " ".join(map(shlex.quote, model_words()["qwen3-4B"])))
    line = line.replace('"${CKPT_ARGS[@]}"', "--hf-checkpoint MODEL")
    words = shlex.split(line, comments=True)
    return [placed(word, place) for word in add_missing_flags(words)]


def unknown_flags(words: list[str]) -> list[str]:
    notices = parse(words, GROUPS, read_engine=read_engine).notices
    return [f"unknown: {notice.flag}" for notice in notices if notice.text.startswith("unknown flag")]


def problems_of_train(line: str, is_elsewhere: bool, place: Path) -> list[str]:
    command = read_command(train_words(line, place))
    unknown = unknown_flags(command.argv)
    if is_elsewhere:
        return unknown
    problems = parse_only(command.argv, is_async=command.is_async)[1]
    return unknown + [text for text in problems if "no SGLang server answers" not in text]  # the reader has started one


def problems_of_slime(words: list[str], line: str, place: Path) -> list[str]:
    match words[1:]:
        case ["plan", *rest] if rest:
            words = train_words(line, place)
            status = main_of_slime(words[1:])
            return unknown_flags(read_command(words[2:]).argv) + ([] if status == 0 else [f"exit status {status}"])
        case ["doctor", *rest] if any(word.endswith(("train.py", "train_async.py")) for word in rest):
            return problems_of_train(line, True, place)
        case ["doctor", ("mismatch" | "env" | "engine") as subject, *rest]:
            return missing_flags(["-m", "slime", "doctor", subject], rest)
        case ["doctor", "--gpu", *rest]:
            return missing_flags(["-m", "slime", "doctor", "--gpu"], rest)
        case [("replay" | "board" | "new" | "clean" | "tasks") as command, *rest]:
            return missing_flags(["-m", "slime", command], rest)
        case ["branch", *rest]:
            own, _, changed = " ".join(rest).partition(" -- ")
            return missing_flags(["-m", "slime", "branch"], own.split()) + unknown_flags(changed.split())
        case ["train" | "train-async", *rest]:
            return unknown_flags([word for word in rest if word != "--help"])
        case (
            []
            | ["--help"]
            | ["plan" | "doctor"]
            | ["doctor", "--deep" | "--json"]
            | ["doctor", "ledger", *_]
            | ["--version"]
        ):
            return []
        case _:
            return [f"{line} is no command of slime"]


@functools.cache
def help_of(*program: str) -> str:
    """The output of a program with --help."""
    done = run_program(*program, "--help", env=os.environ | {"COLUMNS": "200"})
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def missing_flags(program: list[str], words: list[str]) -> list[str]:
    """Flags of a command that are neither in its program's help nor flags of training, which some programs take."""
    known = set(re.findall(r"--[\w-]+", help_of(*program)))
    flags = [word.partition("=")[0] for word in words if word.startswith("--") and word != "--"]
    unknown = [flag for flag in flags if flag not in known]
    if unknown and "convert_hf_to_torch_dist.py" in program[0]:
        unknown = unknown_flags(unknown)
    return [f"{' '.join(program)} has no {flag}" for flag in unknown]


def problems_of_python(words: list[str], line: str, place: Path) -> list[str]:
    match words[1:]:
        case ["-m", "slime", *rest]:
            return problems_of_slime(["slime", *rest], line.replace("python -m slime", "slime"), place)
        case ["-m", "slime.testing", *rest] if rest and "<flags>" not in rest:
            from slime.testing.__main__ import main

            return [] if main(rest) == 0 else ["a check failed"]
        case ["-m", "pytest", *rest]:
            return [word for word in rest if word.startswith("tests/") and not (ROOT / word).exists()]
        case ["-m", module, *_]:
            spec = importlib.util.find_spec(module.split(".")[0])
            return [] if spec else [f"there is no module {module}"]
        case [file, *rest] if (ROOT / file).is_file():
            return missing_flags([file], rest)
        case [file, *_]:
            return [f"there is no file {file}"]
        case _:
            return []


def problems_of(line: str, is_elsewhere: bool, place: Path) -> list[str]:
    words = shlex.split(line, comments=True)
    while words and re.match(r"\w+=", words[0]):
        words.pop(0)
    is_train = any(word.endswith(("train.py", "train_async.py")) for word in words)
    match words:
        case ["slime", *_]:
            return problems_of_slime(words, line, place)
        case [*_, "--help"] if is_train:
            return []
        case ["python" | "python3" | "ray", *_] if is_train:
            return problems_of_train(line, is_elsewhere, place)
        case ["python" | "python3", *_]:
            return problems_of_python(words, line, place)
        case ["make", *targets]:
            known = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            return [f"make has no {one}" for one in targets if one not in known and "=" not in one]
        case ["source" | "bash", path, *_]:
            is_there = (
                (ROOT / path).is_file() or path.endswith("/bin/activate") or path == "my_task/run.sh" or "<" in path
            )
            return [] if is_there else [f"there is no file {path}"]
        case [program, *_] if program in OF_OTHERS:
            return [] if is_elsewhere else [f"{program}: the page must say what it needs"]
        case [program, *_] if program in EVERYWHERE:
            return []
        case _:
            return [f"nobody checks this: {line}"]


@pytest.mark.parametrize("page", dict.fromkeys(page for page, _, _ in all_commands()))
def test_every_command_of_a_page_would_work(
    page: str, readers_place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(readers_place)
    monkeypatch.syspath_prepend(str(readers_place))
    bad = {}
    for owner, line, is_elsewhere in all_commands():
        if owner == page and (problems := problems_of(line, is_elsewhere, readers_place)):
            bad[line] = problems
    capsys.readouterr()  # plans
    assert not bad, "\n".join(f"{line}\n  {problem}" for line, problems in bad.items() for problem in problems)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("python train.py ... --num-rolout 3", "--num-rolout"),
        ("python train.py --prompt-data prompts.jsonl", "--hf-checkpoint is required"),
        ("python tools/make_tiny_task.py --to /tmp/x", "has no --to"),
        ("python tools/no_such_tool.py", "there is no file"),
        ("slime replay outputs/run --turn 3", "has no --turn"),
        ("slime bord outputs/run", "no command of slime"),
        ("make demmo", "make has no demmo"),
        ("bash scripts/run-nothing.sh", "there is no file"),
        ("ray start --head", "the page must say what it needs"),
        ("frobnicate", "nobody checks this"),
    ],
)
def test_a_command_that_would_not_work_is_found(
    line: str, why: str, readers_place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(readers_place)
    assert why in "\n".join(problems_of(line, False, readers_place))


def of_json_lines(code: str) -> None:
    """One object, or one per line."""
    try:
        json.loads(code)
    except json.JSONDecodeError:
        for line in code.splitlines():
            json.loads(line)


READERS: dict[str, Callable[[str], object]] = {
    "python": lambda code: compile(code, "snippet", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT),
    "yaml": yaml.safe_load,
    "json": of_json_lines,
}


@pytest.mark.parametrize("language", READERS)
def test_every_snippet_can_be_read(language: str) -> None:
    for page in PAGES:
        for code in blocks(page, language):
            try:
                READERS[language](code)
            except (SyntaxError, ValueError, yaml.YAMLError) as error:
                pytest.fail(f"{name_of(page)}: {error}\n{code}")


def test_what_snippets_import_exists() -> None:
    missing = []
    for page in PAGES:
        for code in blocks(page, "python"):
            for node in ast.walk(ast.parse(code)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("slime"):
                    module = importlib.import_module(node.module or "")
                    missing += [f"{name_of(page)}: {a.name}" for a in node.names if not hasattr(module, a.name)]
    assert missing == []


INLINE = re.compile(r"`([^`\n]+)`")
FOLDERS = ("slime/", "slime_plugins/", "tests/", "tools/", "examples/", "benchmarks/", "scripts/", "docs/")
OF_READERS = {"dir/file.py", "file.py", "layers.py", "run_tiny.py"}
SGLANG = Path(importlib.util.find_spec("sglang").submodule_search_locations[0]) / "srt"  # type: ignore[union-attr,index]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_a_page_names_exist(page: Path) -> None:
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    names = {re.split(r"[: ]", code)[0] for code in INLINE.findall(text) if code.startswith(FOLDERS)}
    names |= set(re.findall(r"`([\w/]+\.py)(?::\w+)?`", text))  # also those of a room, such as `families/base.py`
    plain = {name.rstrip("/") for name in names if not re.search(r"[<>{]", name)} - OF_READERS
    places = ((ROOT, ""), (ROOT, "slime/**/"), (SGLANG, ""))
    assert [name for name in sorted(plain) if not any(any(top.glob(way + name)) for top, way in places)] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_metrics_that_a_page_names_are_logged(page: Path) -> None:
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    names = [code for code in INLINE.findall(text) if re.match(r"(train|rollout|perf|eval|multi_turn|passrate)/", code)]
    metrics = [re.sub(r"<\w+>", "x", name) for name in names if not (ROOT / "slime" / name).exists()]
    assert [name for name in metrics if not name.endswith(("/", ".jsonl", ".py")) and describe(name) is None] == []
