"""The pages in a browser: no errors, no network, tables that sort and filter, on phones, in dark mode."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_curves import made_run, record
from report_pages import read_lines, write_lines

from hookrun.report import write_report
from hookrun.report.draw.pictures import HeatMap

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="playwright drives the browser, and is not installed"
)
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def screens(browser: Any) -> Iterator[Screens]:
    screens = Screens(browser)
    yield screens
    for context in screens.contexts:
        context.close()


@pytest.fixture
def show(screens: Screens) -> Iterator[Callable[..., Any]]:
    """Open the page in a directory; then check that nothing was logged, and nothing but the page was requested."""
    yield lambda path, colours="light", at="": screens.open(path, colours, at)
    assert screens.said == []
    assert [url for url in screens.asked if not url.startswith(("file:", "data:"))] == []


@pytest.fixture
def look(screens: Screens, show: Callable[..., Any]) -> Callable[[Path], Any]:
    """The page in a directory, for a test that changes nothing in it: opened once for all of them."""

    def look(path: Path) -> Any:
        if path not in screens.loaded:
            screens.loaded[path] = show(path)
        return screens.loaded[path]

    return look


def test_every_picture_is_drawn(observed: Path, look) -> None:
    page = look(observed)
    assert page.locator("svg.chart").count() > 15
    sizes = page.evaluate(
        "[...document.querySelectorAll('img')].map(each => each.complete && each.naturalWidth)"
    )
    assert sizes
    assert all(sizes)
    boxes = page.evaluate("[...document.querySelectorAll('svg.chart, img')].map(each => each.clientHeight)")
    assert min(boxes) > 20


def test_a_statistic_by_depth_is_chosen(tmp_path: Path, show) -> None:
    for number in range(2):
        records = [
            record("seen", module, step, mean=step, std=1.0, histogram={"counts": [1, 2], "edges": [0, 1, 2]})
            for step in range(2)
            for module in ("a", "b")
        ]
        made_run(tmp_path / str(number), records)
    write_report(tmp_path)
    page = show(tmp_path)
    figures = page.locator(".samples figure")
    assert [figures.nth(place).is_visible() for place in range(2)] == [True, False]
    page.select_option("select[aria-label=statistic]", index=1)
    assert [figures.nth(place).is_visible() for place in range(2)] == [False, True]


def test_the_dark_page_is_dark(observed: Path, show, look) -> None:
    def ground(page: Any) -> int:
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return max(int(part) for part in colour[4:-1].split(","))

    assert ground(show(observed, colours="dark")) < 50 < 200 < ground(look(observed))


def test_a_click_on_a_header_sorts(sweep: Path, show) -> None:
    page = show(sweep)
    page.click("th[data-sort='val/accuracy'] button")
    rising = [float(text) for text in cells(page, "val/accuracy")]
    assert rising == sorted(rising)
    assert len(set(rising)) > 2
    assert page.get_attribute("th[data-sort='val/accuracy']", "aria-sort") == "ascending"
    page.click("th[data-sort='val/accuracy'] button")
    assert [float(text) for text in cells(page, "val/accuracy")] == rising[::-1]
    page.click("th[data-sort='train.optimizer.lr'] button")
    assert cells(page, "train.optimizer.lr") == ["0.001", "0.001", "0.01", "0.01", "0.1", "0.1"]


def test_the_mark_of_the_best_job_does_not_sort(sweep: Path, show) -> None:
    page = show(sweep)
    assert any(text.endswith("best") for text in cells(page, "job"))
    page.click("th[data-sort='job'] button")
    assert [text.split()[0] for text in cells(page, "job")] == list("012345")


def test_cells_without_a_number_come_last_in_either_direction(copied: Path, show) -> None:
    with (copied / "2/metrics.jsonl").open("a") as file:
        file.write('{"split": "val", "epoch": 9, "step": 99, "accuracy": "NaN"}\n')
    write_report(copied)
    page = show(copied)
    for _ in range(2):
        page.click("th[data-sort='val/accuracy'] button")
        assert cells(page, "val/accuracy")[-1] == "NaN"


def test_the_names_of_a_map_are_beside_their_rows(observed: Path, look) -> None:
    page = look(observed)
    found = page.evaluate(
        """() => [...document.querySelectorAll(".heat")].map(heat => {
            const plot = heat.querySelector(".heat-plot").getBoundingClientRect();
            const rows = Number(heat.style.getPropertyValue("--rows"));
            return [...heat.querySelectorAll(".heat-rows span")].map(name => {
                const box = name.getBoundingClientRect();
                const row = ((box.top + box.bottom) / 2 - plot.top) / plot.height * rows + 0.5;
                return row - name.style.gridRowStart;
            });
        })"""
    )
    assert sum(map(len, found)) > 20
    assert max(abs(distance) for names in found for distance in names) < 0.75


def test_words_filter_the_table(sweep: Path, show) -> None:
    page = show(sweep)
    page.fill("#filter", "0.01 done")
    assert cells(page, "train.optimizer.lr") == ["0.01", "0.01"]
    assert page.inner_text("#shown") == "2 of 6 jobs"
    page.fill("#filter", "")
    assert len(cells(page, "job")) == 6


def test_the_address_keeps_the_order(sweep: Path, show) -> None:
    page = show(sweep)
    page.click("th[data-sort='job'] button")
    page.click("th[data-sort='job'] button")
    page.fill("#filter", "0.001")
    address = page.evaluate("location.hash")
    assert cells(show(sweep, at=address), "job") == ["1", "0"]


def column(table: Any, place: int) -> list[str]:
    """The texts of a column of a table, of the rows that are shown."""
    return table.evaluate(  # type: ignore[no-any-return]
        """(table, place) => [...table.tBodies[0].rows]
            .filter(row => !row.hidden).map(row => row.cells[place].textContent.trim())""",
        place,
    )


def samples_of(page: Any) -> Any:
    """The table of all predictions of a page, unfolded."""
    table = page.locator("table[data-rows='samples']").first
    page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")
    return table


def test_a_table_of_samples_sorts_by_a_key(predictions: Path, show) -> None:
    table = samples_of(show(predictions))
    before = column(table, 1)
    losses = {str(line["sample"]): line["loss"] for line in read_lines(predictions / "samples.jsonl")}
    assert len(set(losses.values())) > 2
    head = table.locator("th", has_text="loss")
    head.locator("button").focus()
    head.page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "ascending"
    assert column(table, 1) == sorted(before, key=losses.__getitem__)
    head.page.keyboard.press("Space")
    assert head.get_attribute("aria-sort") == "descending"
    assert [losses[sample] for sample in column(table, 1)] == sorted(losses.values(), reverse=True)


def test_equal_cells_keep_their_order(predictions: Path, show) -> None:
    table = samples_of(show(predictions))
    before = dict(zip(column(table, 1), column(table, 3), strict=True))
    table.locator("th", has_text="class").first.locator("button").click()
    classes = sorted(before.items(), key=lambda of_sample: int(of_sample[1]))
    assert column(table, 1) == [sample for sample, _ in classes]


def test_words_filter_a_table_of_samples(predictions: Path, show) -> None:
    table = samples_of(show(predictions))
    total = len(column(table, 1))
    table.page.get_by_label("filter the samples").first.fill("val no such")
    assert column(table, 1) == []
    assert table.page.get_by_text(f"0 of {total} samples").is_visible()
    table.page.get_by_label("filter the samples").first.fill("val")
    assert len(column(table, 1)) == total


ODD = """
<div><table data-rows="things"><thead><tr><th>name</th><th class="n">value</th></tr></thead><tbody>
<tr><td>b10</td><td>1,234</td></tr><tr><td>b9</td><td>−∞</td></tr><tr><td>a</td><td>–</td></tr>
<tr><td>B1</td><td>1e-05</td></tr><tr><td>c</td><td>not 1</td></tr><tr><td>d</td><td>+7.5 ± 0.1</td></tr>
</tbody></table></div><script>
"""


def test_numbers_come_by_size_and_texts_after_them(observed: Path, tmp_path: Path, show) -> None:
    source = (observed / "report.html").read_text()
    (tmp_path / "report.html").write_text(source.replace("<script>", ODD.strip("\n"), 1))
    page = show(tmp_path)
    table = page.locator("table[data-rows='things']")
    table.locator("th button").nth(1).click()
    assert column(table, 1) == ["−∞", "1e-05", "+7.5 ± 0.1", "1,234", "not 1", "–"]
    table.locator("th button").nth(1).click()
    assert column(table, 1) == ["not 1", "1,234", "+7.5 ± 0.1", "1e-05", "−∞", "–"]
    table.locator("th button").nth(0).click()
    assert column(table, 0) == ["a", "B1", "b9", "b10", "c", "d"]


def test_a_table_is_whole_without_a_script(predictions: Path, browser) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto((predictions / "report.html").as_uri())
    table = page.locator("table[data-rows='samples']").first
    assert table.locator("tbody tr").count() == len(read_lines(predictions / "samples.jsonl"))
    assert page.locator("input[type=search], th button").count() == 0
    context.close()


def test_the_value_under_the_pointer_is_shown(observed: Path, look) -> None:
    page = look(observed)
    page.locator("svg.chart").first.hover()
    assert page.locator(".tip").inner_text().startswith("step ")
    page.mouse.move(0, 0)
    assert page.locator(".tip").count() == 0


def test_the_links_of_a_sweep_open_its_jobs(sweep: Path, show) -> None:
    page = show(sweep)
    page.click("table[data-jobs] a >> text=2")
    assert page.url == (sweep / "2/report.html").as_uri()
    assert page.inner_text(".stamp").lower() == "done"


def test_channels_of_a_picture_are_switched(convolved: Path, tmp_path: Path, show) -> None:
    from PIL import Image

    page = show(convolved)
    assert page.inner_text(".sheet-x > span") == "channels 0–11 of 128"
    before = page.get_attribute(".sheet img.mosaic", "src")
    page.click("button[aria-label='later ones']")
    assert page.inner_text(".sheet-x > span") == "channels 12–23 of 128"
    assert page.get_attribute(".sheet img.mosaic", "src") != before
    with page.expect_download() as saved:
        page.locator("figure", has=page.locator(".sheet")).locator("button[data-save]").click(force=True)
    assert saved.value.suggested_filename == "activation_maps.png"
    saved.value.save_as(tmp_path / "saved.png")
    image = Image.open(tmp_path / "saved.png").convert("RGB")
    assert image.width > 1500
    assert len(image.getcolors(2**20)) > 50


DECODER = ("model=decoder", "model.args={layers: 1, heads: 2, width: 16, length: 24}")
NAMES = (*DECODER, "data=names", "data.args.val_size=4")


@pytest.fixture
def three_keys(copied: Path) -> Path:
    """A sweep over three keys."""
    for job in range(6):
        keys = [f"{key}={(job // 2**place) % 2 + 1}" for place, key in enumerate("abc")]
        (copied / f"{job}/.hydra/overrides.yaml").write_text(json.dumps(keys))
    write_report(copied)
    return copied


@pytest.fixture(scope="module")
def made(shared: Callable[..., Path], analysed: Callable[[str], Path]) -> Callable[[str], Path]:
    """The run of a kind of page."""
    argv = {"lens": ("task=lens", *NAMES), "generate": ("task=generate", "task.max_new_tokens=4", *NAMES)}
    return lambda kind: shared(*argv[kind]) if kind in argv else analysed(kind)


KINDS = {
    "observed": "#metrics ~ * svg.chart",
    "convolved": "img.mosaic",
    "predicted": ".heads svg.attention",
    "lens": "table.lens",
    "generate": ".generated",
    "probe": "#analysis ~ * table",
    "similarity": "#analysis ~ * .heat",
    "sweep": "#figures ~ * svg.chart",
    "patched": "#figures ~ * .heat",
    "three_keys": "table[data-jobs]",
}
"""Kind of page, or the fixture that makes it -> the first of its answer."""


@pytest.mark.parametrize("kind", KINDS)
def test_the_answer_is_on_the_first_screen(
    kind: str, request: pytest.FixtureRequest, made: Callable[[str], Path], show
) -> None:
    is_made = kind in ("lens", "generate", "probe", "similarity")
    path = made(kind) if is_made else request.getfixturevalue(kind)
    page = show(getattr(path, "path", path))
    for width, height, screens in ((1400, 900, 1), (390, 844, 2)):
        page.set_viewport_size({"width": width, "height": height})
        assert page.locator(KINDS[kind]).first.bounding_box()["y"] < screens * height
        assert page.evaluate("document.documentElement.scrollWidth") == width


def test_the_outer_columns_of_a_lens_stay_in_sight(made: Callable[[str], Path], show) -> None:
    page = show(made("lens"))
    page.set_viewport_size({"width": 390, "height": 844})
    frame = page.locator(".scroll:has(table.lens)").first
    for left in (0, 200):
        frame.evaluate("(each, left) => each.scrollLeft = left", left)
        outer = frame.bounding_box()
        first, last = (
            frame.locator(f"tbody tr:first-child > :{which}-child").bounding_box()
            for which in ("first", "last")
        )
        assert abs(first["x"] - outer["x"]) < 3
        assert abs(last["x"] + last["width"] - outer["x"] - outer["width"]) < 3


def test_one_sample_is_chosen_at_a_time(predictions: Path, show) -> None:
    page = show(predictions)
    box = page.locator(".samples").first
    shown = box.locator("figure:visible")
    layers = shown.count()
    assert layers == 3
    menu = box.locator("select")
    before, after = (box.locator(f"button[aria-label='{word} sample']") for word in ("previous", "next"))
    assert before.is_disabled()
    after.click()
    assert menu.evaluate("menu => menu.selectedIndex") == 1
    assert shown.count() == layers
    last = menu.locator("option").count() - 1
    menu.select_option(index=last)
    assert after.is_disabled()
    assert box.locator("> details").nth(last).locator("figure").first.is_visible()
    assert not box.locator("> details").nth(1).locator("figure").first.is_visible()


def test_without_scripts_samples_are_folded(predictions: Path, screens: Screens) -> None:
    context = screens.browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto((predictions / "report.html").as_uri())
    names = page.locator(".samples > details > summary")
    assert names.count() == 8
    assert page.locator(".samples figure:visible").count() == 0
    names.nth(2).click()
    assert page.locator(".samples figure:visible").count() == 3
    context.close()


@pytest.fixture
def phone(browser) -> Iterator[Callable[[Path], Any]]:
    """Open the page in a directory on a narrow screen, without its script."""
    context = browser.new_context(viewport={"width": 390, "height": 844}, java_script_enabled=False)

    def phone(path: Path) -> Any:
        page = context.new_page()
        page.goto((path / "report.html").as_uri())
        return page

    yield phone
    context.close()


def with_map(observed: Path, folder: Path) -> Path:
    """A page with a map of twelve columns of long numbers, in the first figure of another page."""
    values = np.geomspace(-1.2345e-5, -9.8765e5, 24, dtype=np.float32).reshape(2, 12)
    names = [f"layer.{place}.of_a_model" for place in range(12)]
    drawn = HeatMap("long", values, rows=names[:2], columns=names, x="column", numbers=True).figure()
    before, after = (observed / "report.html").read_text().split("<figcaption>", 1)
    (folder / "report.html").write_text(f"{before}{drawn.picture}<figcaption>{after}")
    return folder


@pytest.mark.parametrize("of", ["matrix", "similarity", "long"])
def test_no_number_of_a_map_is_cut_on_a_phone(of: str, observed, made, tmp_path, phone) -> None:
    if of == "similarity":
        page = phone(made(of))
    else:
        page = phone(observed if of == "matrix" else with_map(observed, tmp_path))
    scrolled = page.evaluate(
        "[...document.querySelectorAll('.heat')].map(heat => heat.scrollWidth > heat.clientWidth + 1)"
    )
    assert any(scrolled) or of != "long"
    cells = page.evaluate(
        """() => [...document.querySelectorAll(".heat.numbered")].flatMap(heat => {
            if (!heat.checkVisibility()) return [];
            const end = heat.getBoundingClientRect().right
                - parseFloat(getComputedStyle(heat, "::after").width);
            return [...heat.querySelectorAll(".cell-numbers span")].map(cell => {
                const text = document.createRange();
                text.selectNodeContents(cell);
                const [number, box] = [text.getBoundingClientRect(), cell.getBoundingClientRect()];
                const fits = number.left >= box.left && number.right <= box.right;
                return {fits, is_whole: number.right <= end + 1 || number.left >= end - 1};
            });
        })"""
    )
    assert len(cells) >= 9
    assert all(cell["fits"] and cell["is_whole"] for cell in cells)


def brightness(box: Any, page: Any) -> float:
    """The mean brightness of the last pixels inside the right edge of an element."""
    from PIL import Image, ImageStat

    edge = {"x": box["x"] + box["width"] - 5, "y": box["y"] + 4, "width": 3, "height": box["height"] - 8}
    shot = Image.open(io.BytesIO(page.screenshot(clip=edge, full_page=True)))
    return float(ImageStat.Stat(shot.convert("L")).mean[0])


def test_a_table_has_a_shadow_until_its_end_is_reached(sweep: Path, phone) -> None:
    page = phone(sweep)
    frame = page.locator(".scroll:has(table[data-jobs])")
    before = brightness(frame.bounding_box(), page)
    frame.evaluate("each => { each.scrollLeft = each.scrollWidth; }")
    assert brightness(frame.bounding_box(), page) > before + 20
    page.set_viewport_size({"width": 3000, "height": 900})
    assert frame.evaluate("each => each.scrollWidth === each.clientWidth")
    assert brightness(frame.bounding_box(), page) > before + 20


def test_a_link_to_a_folded_part_opens_it(observed: Path, show) -> None:
    page = show(observed)
    assert not page.locator("#model").is_visible()
    page.click(".nav a >> text=Model")
    assert page.locator("#model").is_visible()


EVIL = (
    "</script></pre></title><script>window.pwned=1</script><img src=x onerror=window.pwned=1>"
    '<svg onload=window.pwned=1>" onmouseover="window.pwned=1" \'javascript:window.pwned=1'
)


def evil(value: Any) -> Any:
    """A run with markup in front of every text in it, also of the keys of free mappings."""
    if isinstance(value, list):
        return [evil(each) for each in value]
    if isinstance(value, dict):
        return {key: evil(each) for key, each in value.items()}
    kept = value in ("train", "val", "stats", "check", "print", "capture", "sample", "firing", "")
    return EVIL + value if isinstance(value, str) and not kept else value


def test_no_script_runs_from_names(observed: Path, tmp_path: Path, show) -> None:
    path = tmp_path / "runs/0"
    shutil.copytree(observed, path)
    for name in ("plan.json", "model.json", "hooks.json", "env.json", "status.json"):
        (path / name).write_text(
            json.dumps({**evil(json.loads((path / name).read_text())), "manifest": None})
        )
    for name in ("metrics.jsonl", "stats.jsonl"):
        records = list(map(evil, read_lines(path / name)))
        if name == "metrics.jsonl":
            records += [{"split": EVIL, "step": n, EVIL: float(n)} for n in range(3)]
        write_lines(path / name, records)
    index = path / "captures/index.jsonl"
    lines = read_lines(index)
    for entry in [entry for line in lines for entry in line["entries"]]:
        entry |= {"hook": EVIL + entry["hook"], "module": EVIL + entry["module"], "path": EVIL}
    write_lines(index, lines)
    (path / "error.txt").write_text(EVIL)
    (path / ".hydra/config.yaml").write_text(json.dumps({"task": {"name": EVIL}, "model": {"name": EVIL}}))
    (path / ".hydra/overrides.yaml").write_text(json.dumps([f"seed={EVIL}"]))
    write_report(path)
    write_report(path.parent)
    for folder in (path, path.parent):
        page = show(folder)
        page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")
        for place in range(page.locator("svg.chart").count()):
            page.locator("svg.chart").nth(place).hover()
        assert page.evaluate("window.pwned") is None
        assert EVIL[:30] in page.inner_text("body")
        assert page.locator("script").count() == 1


@dataclass
class Screens:
    """The pages that are open, what they logged, and what they asked for.

    loaded: directory -> its page at the usual size, for tests that only look at it
    """

    browser: Any
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    contexts: list[Any] = field(default_factory=list)
    loaded: dict[Path, Any] = field(default_factory=dict)

    def open(self, path: Path, colours: str, at: str) -> Any:
        view = {"width": 1200, "height": 800}
        self.contexts.append(self.browser.new_context(viewport=view, color_scheme=colours))
        page = self.contexts[-1].new_page()
        page.on("console", lambda message: self.said.append(message.text))
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.on("request", lambda request: self.asked.append(request.url))
        page.goto((path / "report.html").as_uri() + at)
        return page


def cells(page: Any, column: str) -> list[str]:
    return page.evaluate(  # type: ignore[no-any-return]
        """name => {
            const at = document.querySelector(`th[data-sort="${name}"]`).cellIndex;
            return [...document.querySelectorAll("table[data-jobs] tbody tr")]
                .filter(row => !row.hidden).map(row => row.cells[at].textContent.trim());
        }""",
        column,
    )
