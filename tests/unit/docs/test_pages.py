"""The site builds, every link has a target, and every page is in the navigation and on the home page."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import mkdocs.utils
import pytest

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
def test_every_link_leads_to_a_file_and_to_a_heading_in_it(page: Path) -> None:
    broken = []
    for link in _LINK.findall(_FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        file = (page.parent / target).resolve() if target else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            broken.append(link)
    assert broken == []


def test_every_page_that_the_code_names_exists() -> None:
    places = ("slime", "slime_plugins", "tools", "examples", "scripts")
    files = [path for place in places for path in (_ROOT / place).rglob("*") if path.suffix in (".py", ".sh", ".yaml")]
    named = {name for path in files for name in re.findall(r"\bdocs/[\w./-]+\.md", path.read_text())}
    assert len(named) > 5
    assert [name for name in sorted(named) if not (_ROOT / name).is_file()] == []


def test_the_site_builds_without_a_warning_and_holds_every_page(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    env = os.environ | {"DOCS_REPO_URL": "https://example.org/me/slime"}
    done = subprocess.run(command, cwd=_ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert '<a href="https://example.org/me/slime"' in (tmp_path / "site" / "agents.html").read_text(encoding="utf-8")
    built = {path.relative_to(tmp_path / "site").with_suffix(".md") for path in (tmp_path / "site").rglob("*.html")}
    for page in (_ROOT / "docs").rglob("*.md"):
        name = page.relative_to(_ROOT / "docs")
        assert name in built or (name.name == "README.md" and name.with_name("index.md") in built), name
    index = json.loads((tmp_path / "site" / "search" / "search_index.json").read_text(encoding="utf-8"))
    boosts = {entry["location"]: entry.get("boost", 1) for entry in index["docs"]}
    # Tables of every flag and every decision have all words, and would be the first hits of most searches.
    below = [place for place in boosts if re.match(r"(flags|metrics)\.html|adr/", place)]
    assert len(below) > 30
    assert all(boosts[place] < 1 for place in below)
    assert all(boosts[place] == 1 for place in ("agents.html", "en/get_started/customization.html"))


def pages_of(nav: object) -> list[str]:
    """Every page that the navigation lists, in order and with repetitions."""
    match nav:
        case str():
            return [nav]
        case dict():
            return [page for entry in nav.values() for page in pages_of(entry)]
        case list():
            return [page for entry in nav for page in pages_of(entry)]
    raise TypeError(nav)


def test_the_navigation_lists_every_page_once() -> None:
    config = mkdocs.utils.yaml_load((_ROOT / "mkdocs.yml").read_text())
    pages = {str(path.relative_to(_ROOT / "docs")) for path in (_ROOT / "docs").rglob("*.md")}
    assert sorted(pages_of(config["nav"])) == sorted(pages)


def test_the_home_page_links_every_page() -> None:
    home = _ROOT / "docs" / "index.md"
    linked = {link.partition("#")[0] for link in _LINK.findall(home.read_text(encoding="utf-8"))}
    pages = {str(path.relative_to(home.parent)) for path in home.parent.rglob("*.md")} - {"index.md"}
    assert pages - linked == set()


# Phrase -> hits per 1000 words that the pages may have: twice the rate of well-written projects of this field.
PROSE = {
    r"\b(nobody|somebody|whoever|anybody)\b": 0.06,
    r"\b[Ww]hat (a|an|the|is|it|was|they|users|one|comes|follows|becomes|has|had|can|may|will)\b": 0.6,
    r"\b[Ww]here (it|there|no|one|nothing|a|the|this|that) ": 0.6,
    r"\b(is told|are told|tells|says so|is said|says (how|what|which|who|whether|where))\b": 0.2,
    r"\bof (one's|its|their|our|your) own\b": 0.1,
    r"\b(stands?|behind)\b": 0.4,
    r";": 10,
}


@pytest.mark.parametrize("phrase", PROSE)
def test_pages_are_plain_technical_english(phrase: str) -> None:
    text = "\n".join(re.sub(r"`[^`\n]*`", "x", _FENCE.sub("", page.read_text(encoding="utf-8"))) for page in _PAGES)
    rate = 1000 * len(re.findall(phrase, text)) / len(text.split())
    assert rate <= PROSE[phrase]
