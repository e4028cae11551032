"""`index.html`, the page of a folder of runs."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from made_runs import change, made_run

from hookrun.report import try_report, write_index
from hookrun.report.__main__ import main
from hookrun.report.index import MOST_BYTES, index_page
from hookrun.runs import main as list_runs
from hookrun.store.runs import Runs, runs

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
EVIL = "</script></table><script>window.pwned=1</script><img src=x onerror=window.pwned=1>\x1b\" onload='x"


def metrics(accuracy: float) -> list[dict[str, Any]]:
    return [{"split": "val", "of": "epoch", "accuracy": accuracy, "loss": 1 - accuracy}]


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    """Three runs, of which one has a page."""
    folder = tmp_path / "outputs"
    typed = ("experiment=clip_fc", "hooks.clip_fc.max=0.001")
    made_run(
        folder / "one", *typed, started="2026-05-01T10:00:00+00:00", metrics=metrics(0.5), tags=["paper"]
    )
    made_run(
        folder / "two", "seed=10", started="2026-05-02T10:00:00+00:00", metrics=metrics(0.75), note="a try"
    )
    made_run(folder / "three", "seed=9", started="2026-05-03T10:00:00+00:00", status="failed")
    (folder / "two/report.html").write_text("a page")
    return folder


def rows(page: str) -> list[list[str]]:
    """The cells of each row."""
    body = page.split("<tbody>")[1].split("</tbody>")[0]
    return [re.split(r"<td[^>]*>", row)[1:] for row in body.split("<tr>")[1:]]


def titles(page: str) -> list[str]:
    return re.findall(r"<th(?: [^>]*)?>(.*?)</th>", page.split("<tbody>")[0])


def test_the_index_has_a_row_for_each_run(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(outputs)]) == 0
    assert capsys.readouterr().out == f"{outputs / 'index.html'}\n"
    page = (outputs / "index.html").read_text()
    assert titles(page) == [
        "name", "status", "experiment", "task", "model", "val/accuracy", "val/loss",
        "hooks", "overrides", "note", "tags", "duration (s)", "started (UTC)",
    ]  # fmt: skip
    three, two, one = rows(page)
    assert three[0] == '<a href="./three/">three</a>'
    assert two[0] == '<a href="./two/report.html">two</a>'
    assert [cell.strip() for cell in one[1:]] == [
        "done", "clip_fc", "train", "cnn", "0.5", "0.5", "clip_fc: grad clamp fc.weight, fc.bias",
        "experiment=clip_fc hooks.clip_fc.max=0.001", "", "paper", "0", "2026-05-01 10:00:00",
    ]  # fmt: skip


def test_runs_and_sweeps_have_no_index(outputs: Path) -> None:
    assert write_index(outputs / "one") is None
    for number in (0, 1):
        made_run(outputs / f"sweep/{number}", f"seed={number}")
    assert write_index(outputs / "sweep") is None, "its jobs are numbered"
    made_run(outputs / "named/seed_1")
    assert write_index(outputs / "named") == outputs / "named/index.html"
    (outputs / "named/multirun.yaml").touch()
    assert write_index(outputs / "named") is None
    assert write_index(outputs / "one/.hydra") is None
    (outputs.parent / "deep/er").mkdir(parents=True)
    shutil.move(outputs / "two", outputs.parent / "deep/er/two")
    assert write_index(outputs.parent / "deep") == outputs.parent / "deep/index.html"


def test_a_page_of_somebody_else_is_left_alone(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (outputs / "index.html").write_text("mine")
    assert main([str(outputs)]) == 1
    assert "is left as it is" in capsys.readouterr().err
    try_report(outputs / "one")
    assert (outputs / "index.html").read_text() == "mine"
    (outputs / "index.html").unlink()
    secret = outputs.parent / "secret"
    secret.write_text("secret")
    (outputs / "index.html").symlink_to(secret)
    assert main([str(outputs)]) == 1
    assert secret.read_text() == "secret"


def test_names_on_the_index_are_escaped(outputs: Path) -> None:
    hook = {"name": EVIL, "hook": EVIL, "action": EVIL, "targets": [{"path": EVIL}]}
    config: dict[str, Any] = {
        "task": {"name": EVIL},
        "model": {"name": EVIL},
        "tags": [EVIL[:90]],
        "note": EVIL,
    }
    made_run(outputs / EVIL.replace("/", "-"), f"x={EVIL}", hooks=[hook], metrics=[{EVIL: 1.0}], **config)
    change(outputs / "one", status=EVIL, reason=EVIL, started=EVIL)
    page = index_page(runs(outputs))
    assert page.count("<script>") == 1
    assert "<img" not in page
    assert "\x1b" not in page
    assert "onload='" not in page


def test_a_name_that_is_not_text_has_a_link(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (outputs / "one").rename(outputs / "o\udcffe")
    assert main([str(outputs)]) == list_runs([str(outputs)]) == 0
    assert '<a href="./o%FFe/">o\\udcffe</a>' in (outputs / "index.html").read_text()
    assert "o\\udcffe" in capsys.readouterr().out


def test_a_long_index_leaves_out_the_oldest(outputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = index_page(runs(outputs))
    assert "are shown" not in whole
    monkeypatch.setattr("hookrun.report.index.MOST_BYTES", 500)
    page = index_page(runs(outputs))
    assert [row[0] for row in rows(page)] == [row[0] for row in rows(whole)][: len(rows(page))]
    assert f"The newest {len(rows(page))} of 3 runs are shown" in page
    assert MOST_BYTES < 3_000_000


def test_the_index_is_written_again_only_if_there(outputs: Path) -> None:
    try_report(outputs / "one")
    assert not (outputs / "index.html").exists()
    write_index(outputs)
    write_index(outputs.parent)
    made_run(outputs / "four", "seed=4")
    try_report(outputs / "four")
    for folder in (outputs, outputs.parent):
        assert len(rows((folder / "index.html").read_text())) == 4


def test_two_runs_that_end_together_are_both_listed(outputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_index(outputs)
    four = outputs / "four"

    def runs_before_another_ends(folder: Path) -> Runs:
        found = runs(folder)
        if not four.exists():
            made_run(four)
            try_report(four)
        return found

    monkeypatch.setattr("hookrun.report.index.runs", runs_before_another_ends)
    try_report(outputs / "one")
    assert len(rows((outputs / "index.html").read_text())) == 4


def test_the_jobs_of_a_sweep_leave_the_index_to_it(outputs: Path) -> None:
    write_index(outputs)
    job = made_run(outputs / "sweep/0", "seed=4")
    (job / "job.json").write_text("{}")
    try_report(job)
    assert len(rows((outputs / "index.html").read_text())) == 3
    try_report(job.parent)
    assert len(rows((outputs / "index.html").read_text())) == 4


def test_a_failure_of_the_index_is_told(
    outputs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_index(outputs)

    def fail(found: object) -> str:
        raise RuntimeError("boom")

    monkeypatch.setattr("hookrun.report.index.index_page", fail)
    assert try_report(outputs / "one") == outputs / "one/report.html"
    told = capsys.readouterr().err
    assert "index.html: not made: RuntimeError: boom" in told
    assert f"to make it later: python -m hookrun.report {outputs}\n" in told


# ---- in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium on this machine")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def show(browser: Any, outputs: Path) -> Iterator[Callable[..., Any]]:
    """Open the index; at the end nothing was logged, and nothing but the page was requested."""
    said = list[str]()
    asked = list[str]()
    contexts = list[Any]()

    def show(at: str = "", width: int = 1400, **options: Any) -> Any:
        page_path = write_index(outputs)
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, **options))
        page = contexts[-1].new_page()
        page.on("console", lambda line: said.append(line.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"file://{page_path}{at}")
        return page

    yield show
    for context in contexts:
        context.close()
    assert said == []
    assert [url for url in asked if not url.startswith("file:")] == []


def visible(page: Any) -> list[str]:
    return list(page.locator("tbody tr:not([hidden]) a").all_inner_texts())


def test_the_index_is_sorted_by_a_click(show: Callable[..., Any]) -> None:
    page = show()
    assert visible(page) == ["three", "two", "one"]
    page.click("th[data-sort='val/accuracy'] button")
    assert visible(page) == ["one", "two", "three"], "missing values come last"
    page.click("th[data-sort='val/accuracy'] button")
    assert visible(page) == ["two", "one", "three"]
    assert page.get_attribute("th[data-sort='val/accuracy']", "aria-sort") == "descending"


def test_the_index_is_searched_and_filtered(show: Callable[..., Any]) -> None:
    page = show()
    page.fill("#filter", "CLAMP paper")
    page.wait_for_selector("#shown:not(:empty)")
    assert visible(page) == ["one"]
    assert page.inner_text("#shown") == "1 of 3 runs"
    page.fill("#filter", "")
    page.wait_for_selector("#shown:empty", state="attached")
    page.fill("input[aria-label='filter val/accuracy']", ">0.6")
    page.wait_for_selector("#shown:not(:empty)")
    assert visible(page) == ["two"]
    again = show(page.url.partition("index.html")[2])
    assert visible(again) == ["two"], "the address keeps it"


def test_without_scripts_the_index_is_a_table(show: Callable[..., Any]) -> None:
    page = show(java_script_enabled=False)
    assert page.locator("tbody tr").count() == 3
    assert not page.locator("#filter").is_visible()
    assert page.locator("input").count() == 1


def test_on_a_phone_the_name_stays_in_view(show: Callable[..., Any]) -> None:
    page = show(width=390, color_scheme="dark")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.evaluate("document.querySelector('.scroll').scrollLeft = 400")
    box = page.locator("tbody td").first.bounding_box()
    assert 0 <= box["x"] < 40
    assert box["width"] < 200


def test_no_script_of_a_name_runs_on_the_index(outputs: Path, show: Callable[..., Any]) -> None:
    made_run(outputs / EVIL.replace("/", "-"), f"x={EVIL}", note=EVIL, tags=[EVIL[:90]])
    page = show()
    page.fill("#filter", "pwned")
    page.wait_for_selector("#shown:not(:empty)")
    assert len(visible(page)) == 1
    assert page.evaluate("window.pwned") is None
