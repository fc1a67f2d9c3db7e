"""The picture of a console: the lines of a real terminal, as they are after every replacement."""

from __future__ import annotations

import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest

from tools.console_picture import main

PROGRAM = r"""
import sys, time
assert sys.stdout.isatty()
print("first line")
sys.stdout.write("\r\x1b[K=> 1/2"); sys.stdout.flush(); time.sleep(0.2)
sys.stdout.write("\r\x1b[Ksecond line\n")
"""


def picture(monkeypatch: pytest.MonkeyPatch, path: Path, *words: str) -> str:
    monkeypatch.setattr(sys, "argv", ["console_picture.py", "--output", str(path), *words])
    main()
    return path.read_text()


def lines(svg: str) -> list[str]:
    texts = re.findall(r'class="console-r\d+"[^>]*>([^<]*)</text>', svg)
    return [text for text in (unescape(text).replace("\xa0", " ").strip() for text in texts) if text]


def test_the_picture_is_the_screen_at_the_end_or_at_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("--", sys.executable, "-c", PROGRAM)
    svg = picture(monkeypatch, tmp_path / "end.svg", *command)
    assert lines(svg) == ["first line", "second line"]
    assert "http://www.w3.org" in svg
    assert "cdnjs" not in svg
    assert lines(picture(monkeypatch, tmp_path / "at.svg", "--at", "=> 1/2", *command)) == ["first line", "=> 1/2"]
    assert lines(picture(monkeypatch, tmp_path / "rows.svg", "--rows", "1", *command)) == ["second line"]


def test_a_failed_command_leaves_no_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        picture(monkeypatch, tmp_path / "no.svg", "--", sys.executable, "-c", "raise SystemExit(3)")
    assert not (tmp_path / "no.svg").exists()
