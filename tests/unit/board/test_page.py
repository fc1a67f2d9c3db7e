"""The page of the board in a headless Chromium, over made runs. Skipped without one."""

from __future__ import annotations

import csv
import json
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.board import serving
from benchmarks.browser import Browser, find_chromium
from benchmarks.made_run import make_run
from slime.board.server import STATIC

pytestmark = pytest.mark.skipif(
    find_chromium() is None, reason="no chromium here: apt-get install chromium, or name one in CHROMIUM"
)
PLACES = ("#runs", "#overview", "#metrics", "#samples", "#samples?by_group=true", "#sample/rollout/1/3", "#run")
LONG = "arithmetic-with-a-name-that-is-longer-than-a-narrow-screen-is-wide-lr-3e-6"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    outputs = tmp_path_factory.mktemp("outputs")
    for seed, name in enumerate((LONG, "other")):
        make_run(outputs / name, num_rollouts=32, num_samples=16, seed=seed, extra_text="word" * 40 + " ")
    with serving(outputs) as address:
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as opened:
        yield opened


@pytest.mark.parametrize("width", [390, 700, 1280])
def test_no_page_is_wider_than_its_window(url: str, browser: Browser, width: int) -> None:
    for place in PLACES:
        browser.open(f"{url}/{place}{'&' if '?' in place else '?'}run={LONG}&run=other", (width, 900))
        assert browser.value("document.documentElement.scrollWidth") == width, place
        # The tabs can be reached and the charts have room.
        assert browser.value("document.querySelector('nav').getBoundingClientRect().right") <= width, place
        charts = browser.value("[...document.querySelectorAll('.chart > svg')].map((c) => c.clientWidth)")
        assert all(250 < chart < width for chart in charts), place
        if width < 800 and place in ("#runs", "#samples"):
            hidden = "[...document.querySelectorAll('.scroll')].map((table) => table.scrollWidth - table.clientWidth)"
            assert max(browser.value(hidden)) <= 0, f"{place}: columns are cut off"


def test_the_first_paint_needs_few_requests_and_bytes(url: str, browser: Browser) -> None:
    browser.open(f"{url}/#overview?run=other")
    entries = json.loads(browser.value("JSON.stringify(performance.getEntriesByType('resource'))"))
    paths = [entry["name"].removeprefix(url) for entry in entries]
    assert sorted(path.split("?")[0] for path in paths if path.startswith("/api/")) == [
        "/api/metrics",
        "/api/run",
        "/api/runs",
    ]
    assert len(paths) <= 3 + len(list(STATIC.iterdir()))
    # 30 KiB compressed. A library for charts would double it.
    page = sum(entry["encodedBodySize"] for entry in entries if "/static/" in entry["name"])
    assert 5_000 < page < 40_000


def test_all_charts_of_a_page_have_one_named_x_axis(url: str, browser: Browser) -> None:
    names = "[...new Set([...document.querySelectorAll('#overview .axis:not([transform])')].map((t) => t.textContent))]"
    for x, name in (("rollout", "rollout"), ("step", "optimizer step"), ("tokens", "response tokens trained on")):
        browser.open(f"{url}/#overview?run=other&x={x}")
        assert browser.value(names) == [name]
    browser.open(f"{url}/#overview?run=other&x=time")
    assert browser.value(names)[0].endswith("since the start")
    assert browser.value("document.querySelectorAll('#overview svg').length") >= 12
    assert "weight_version" not in browser.value("document.querySelector('#overview').textContent")


def test_rounding_errors_do_not_fill_a_chart_and_equal_curves_are_one(browser: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_rollouts=1, num_samples=1)
    lines = []
    for step in range(8):
        noise = 1e-9 * (-1) ** step
        losses = {"train/loss": noise, "train/pg_loss": noise, "train/kl_loss": 0.0, "train/grad_norm": noise}
        lines.append(json.dumps({"step_key": "train/step", "train/step": step, "time": step} | losses))
    (run / "metrics.jsonl").write_text("\n".join([*lines, ""]))
    heights = (
        "(title) => {const box = [...document.querySelectorAll('.chart')].find((c) => c.textContent.startsWith(title));"
        "return [...box.querySelectorAll('path.line')].map((p) => p.getBoundingClientRect().height)}"
    )
    with serving(run) as url:
        browser.open(f"{url}/#overview?x=step")
        (loss, _), (norm,) = (browser.value(f"({heights})('{title}')") for title in ("Loss", "Gradient norm"))
        assert "loss = pg_loss" in browser.value("document.querySelector('#overview').textContent")
    assert loss < 3, "the axis of losses has a least extent"
    assert norm > 40


def test_the_address_holds_the_state_of_the_page(url: str, browser: Browser) -> None:
    browser.open(f"{url}/#overview?run={LONG}&smooth=0.5")
    curves = "document.querySelectorAll('#overview-charts .card:first-child path.line').length"
    assert (browser.value(curves), browser.value(curves.replace("path.line", "path.raw"))) == (1, 1)
    pick = "document.querySelector('#overview-controls select')"
    browser.value(f"{pick}.value = 'other'; {pick}.dispatchEvent(new Event('change'))")
    browser.settle()
    assert browser.value(curves) == 2
    browser.value("document.querySelector('#overview-charts .tool').click()")
    browser.settle()
    address = browser.value("location.hash")
    assert address == f"#overview?smooth=0.5&run={LONG}&run=other&log=Reward"
    # A tab keeps the chosen runs, and a copied address shows the same page.
    assert browser.value("document.querySelector('nav a[data-tab=samples]').hash") == address.replace(
        "overview", "samples"
    )
    browser.open(f"{url}/{address}")
    assert browser.value(curves) == 2
    assert browser.value("document.querySelector('#overview-charts .tool').ariaPressed") == "true"


def test_a_drag_zooms_every_chart_and_a_button_ends_it(url: str, browser: Browser) -> None:
    browser.open(f"{url}/#overview?run=other")
    box = browser.value(
        "(({left, top, width}) => [left, top, width])(document.querySelector('.chart > svg').getBoundingClientRect())"
    )
    left, y, right = box[0] + 62 + 40, box[1] + 80, box[0] + box[2] - 60
    browser.drag((left, y), (right, y))
    browser.settle()
    low, high = map(float, browser.value("new URLSearchParams(location.hash.split('?')[1]).get('zoom')").split(":"))
    assert 0 < low < high < 31
    texts = "document.querySelectorAll('.chart:first-child > svg > text[text-anchor=middle]:not(.axis)')"
    ticks = f"[...{texts}].map((text) => Number(text.textContent))"
    assert all(low <= tick <= high for tick in browser.value(ticks))
    browser.value("[...document.querySelectorAll('button')].find((b) => b.textContent == 'whole range').click()")
    browser.settle()
    assert "zoom" not in browser.value("location.hash")
    assert max(browser.value(ticks)) > high


def test_the_pages_of_a_run_name_its_state_its_best_value_and_its_command(url: str, browser: Browser) -> None:
    browser.open(f"{url}/#overview?run=other")
    tiles = browser.value("[...document.querySelectorAll('.tile')].map((tile) => tile.textContent)")
    assert tiles[0] == "rollouts32 of 32"
    assert all("best 0." in tile for tile in tiles[1:3]), "reward and evaluation"
    browser.open(f"{url}/#run?run=other")
    text = browser.value("document.getElementById('run').textContent")
    for fact in ("finished", socket.gethostname(), "Versions", "--prompt-data train.jsonl", "copy"):
        assert fact in text
    assert "secret" not in text


def click(browser: Browser, selector: str) -> None:
    browser.value(f"document.querySelector({selector!r}).click()")


def saved(folder: Path, name: str) -> list[dict[str, str]]:
    """Rows of a file that the browser saves. Until it is whole it has another name."""
    deadline = time.monotonic() + 60
    while not (folder / name).is_file() and time.monotonic() < deadline:
        time.sleep(0.05)
    return list(csv.DictReader((folder / name).read_text().splitlines()))


def test_a_click_saves_the_points_of_a_chart_or_of_all_metrics_of_the_chosen_runs(
    url: str, browser: Browser, tmp_path: Path
) -> None:
    browser.allow(tmp_path)
    browser.open(f"{url}/#overview?run={LONG}&run=other&smooth=0.9&zoom=3:5")
    click(browser, "#overview-charts a.tool")
    rows = saved(tmp_path, "Reward.csv")
    assert {(row["run"], row["metric"]) for row in rows} == {(r, "rollout/raw_reward") for r in (LONG, "other")}
    places = [(row["run"], float(row["rollout"])) for row in rows]
    assert places == [(run, float(rollout)) for run in (LONG, "other") for rollout in range(32)], "also beside the zoom"
    curves = "fetch('/api/metrics?run=other').then((reply) => reply.json())"
    drawn = browser.value(f"{curves}.then((all) => all['rollout/raw_reward'].y)")
    assert [float(row["value"]) for row in rows if row["run"] == "other"] == pytest.approx(drawn, rel=1e-5)
    click(browser, "#overview-controls a[download]")
    rows = saved(tmp_path, "metrics.csv")
    names = set(browser.value(f"{curves}.then(Object.keys)"))
    assert {(row["run"], row["metric"]) for row in rows} >= {(run, name) for run in (LONG, "other") for name in names}


def test_the_copy_button_copies_a_command_that_a_shell_splits_into_the_same_words(
    url: str, browser: Browser, tmp_path: Path
) -> None:
    browser.allow(tmp_path)
    browser.open(f"{url}/#run?run=other")
    info = browser.value("fetch('/api/run?run=other').then((reply) => reply.json())")
    button = "#run-facts button"
    for clipboard, said in ((True, "copied"), (False, "not allowed here: select the text")):
        if not clipboard:  # as on a page that is neither encrypted nor of this machine
            browser.value("Object.defineProperty(navigator, 'clipboard', {value: undefined}), 0")
        click(browser, button)
        browser.settle()
        assert browser.value(f"document.querySelector('{button}').textContent") == said
        if clipboard:
            copied = browser.value("navigator.clipboard.readText()")
    split = subprocess.run(["sh", "-c", f"printf '%s\\n' {copied}"], capture_output=True, text=True, check=True)
    assert split.stdout.splitlines() == ["python", info["driver"], *info["argv"]]
    assert copied == browser.value("document.querySelector('#run-facts pre').textContent")


def test_the_theme_follows_the_system_until_one_is_chosen(url: str, browser: Browser) -> None:
    color = "getComputedStyle(document.body).backgroundColor"
    browser.open(f"{url}/#overview", theme="dark")
    dark = browser.value(color)
    browser.open(f"{url}/#overview", theme="light")
    light = browser.value(color)
    assert light != dark
    seen = []
    for _ in range(3):
        browser.value("document.getElementById('theme').click()")
        seen.append((browser.value("document.getElementById('theme').textContent"), browser.value(color)))
    assert seen == [("theme: light", light), ("theme: dark", dark), ("theme: system", light)]


def test_a_search_is_in_the_address_and_a_group_opens_its_samples(url: str, browser: Browser) -> None:
    browser.open(f"{url}/#samples?run=other&rollout=3&by_group=true")
    rewards = (
        "[...document.querySelectorAll('#rows tbody tr:first-child .reward')].map((r) => [r.textContent, r.className])"
    )
    found = browser.value(rewards)
    assert len(found) == 8
    assert {(text, "high" if "high" in name else "low") for text, name in found} <= {("1", "high"), ("0", "low")}
    browser.value("document.querySelector('#rows tbody tr').click()")
    browser.settle()
    assert browser.value("document.querySelectorAll('#rows tbody tr').length") == 8
    assert "group=300" in browser.value("location.hash")
    browser.open(f"{url}/#samples?run=other&rollout=all&text=no+such+text")
    assert "No recorded sample" in browser.value("document.getElementById('rows').textContent")
    assert browser.value("document.getElementById('filter-text').value") == "no such text"
