"""Documentation: the site builds, every link leads somewhere, every page is reachable."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

_ROOT = Path(__file__).parents[3]
_PAGES = sorted(
    path for place in ("*.md", "docs/**/*.md", "examples/**/*.md", "scripts/**/*.md") for path in _ROOT.glob(place)
)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower().replace("`", "")).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", _PAGES, ids=lambda path: str(path.relative_to(_ROOT)))
def test_every_link_leads_to_a_file_and_to_a_heading_in_it(page: Path):
    broken = []
    for link in _LINK.findall(_FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        file = (page.parent / target).resolve() if target else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            broken.append(link)
    assert broken == []


def test_every_page_that_the_code_names_exists():
    places = ("slime", "slime_plugins", "tools", "examples", "scripts")
    files = [path for place in places for path in (_ROOT / place).rglob("*") if path.suffix in (".py", ".sh", ".yaml")]
    named = {name for path in files for name in re.findall(r"\bdocs/[\w./-]+\.md", path.read_text())}
    assert len(named) > 5
    assert [name for name in sorted(named) if not (_ROOT / name).is_file()] == []


def test_the_site_builds_without_a_warning_and_holds_every_page(tmp_path: Path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    built = {path.relative_to(tmp_path / "site").with_suffix(".md") for path in (tmp_path / "site").rglob("*.html")}
    for page in (_ROOT / "docs").rglob("*.md"):
        name = page.relative_to(_ROOT / "docs")
        assert name in built or (name.name == "README.md" and name.with_name("index.md") in built), name


def test_every_page_is_in_the_navigation():
    # pages are built also when nobody can find them
    config = yaml.safe_load((_ROOT / "mkdocs.yml").read_text())
    listed = set(re.findall(r"[\w/.\-]+\.md", str(config["nav"])))
    pages = {str(path.relative_to(_ROOT / "docs")) for path in (_ROOT / "docs").rglob("*.md")}
    assert listed == pages


def test_every_kill_of_the_chaos_tables_costs_less_than_the_ten_seconds_that_the_readme_says():
    page = (_ROOT / "docs" / "reliability.md").read_text()
    tables = page[page.index("<!-- chaos: begin -->") : page.index("<!-- chaos: end -->")]
    rows = [line for line in tables.splitlines() if re.match(r"\| [A-Za-z ]+ \| *!?[\d.]+ s", line)]
    seconds = [float(cell) for row in rows for cell in re.findall(r"([\d.]+) s", row)]
    assert len(rows) == 11, "five kinds of process go on, six are named"
    assert max(seconds) < 10
