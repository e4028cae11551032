"""HTML for notebooks: bounded, escaped, and in the notebook's own colours."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hookrun.engine.html import MOST_COLUMNS, MOST_ROWS, Cell, View, escaped

HOSTILE = (
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    '" onmouseover="alert(1)',
    "' style='background:red",
    "&lt;",
    "\x1b[31mred\x07\x00",
    "abc\u202egpj.exe\u2066",
    "half \ud800 of a character",
    "x" * 10_000,
)


def table(heads: Sequence[str], rows: Sequence[Sequence[Cell]], count: int | None = None) -> str:
    return View("", heads, rows, count).as_html()


class Page(HTMLParser):
    """Collects the tags, the names of attributes and the text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags = set[str]()
        self.names = set[str]()
        self.texts = list[str]()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.names |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_adds_no_tag_or_attribute(name: str) -> None:
    plain = Page(View("a", ["b"], [["c"]], lines=["d"]).as_html())
    hostile = Page(View(name, [name], [[name]], lines=[name]).as_html())
    assert hostile.tags == plain.tags
    assert hostile.names == plain.names == {"style"}


@given(st.text())
def test_any_text_can_be_read_and_encoded(name: str) -> None:
    page = table([name], [[name]])
    assert page.encode()
    assert not re.search("[\x00-\x1f\u202a-\u202e\u2066-\u2069]", page)


def test_a_long_text_keeps_beginning_and_end() -> None:
    assert escaped("first" + "x" * 10_000 + "last") == "first" + "x" * 35 + "…" + "x" * 36 + "last"


@pytest.mark.parametrize("count", [0, 1, MOST_ROWS, MOST_ROWS + 1, 5_000])
def test_a_table_shows_20_rows_and_the_count(count: int) -> None:
    texts = Page(table(["number"], [[f"row {number}"] for number in range(count)])).texts
    assert [text for text in texts if text.startswith("row")] == [
        f"row {number}" for number in range(min(count, 20))
    ]
    assert [text for text in texts if "more" in text] == ([f"and {count - 20:,} more"] if count > 20 else [])


def test_rows_that_are_left_out_are_counted() -> None:
    rows = [[number] for number in range(5)]
    assert "and 999,995 more" in table(["number"], rows, 1_000_000)
    assert View("t", ["number"], rows, 1_000_000).as_text().splitlines()[-1] == "  and 999,997 more"


def test_a_wide_table_says_how_many_columns_more() -> None:
    heads = [f"head {number}" for number in range(MOST_COLUMNS + 1_000)]
    page = table(heads, [heads])
    assert page.count("<th ") == page.count("<td ") == MOST_COLUMNS
    assert "1,000 more columns" in page


def test_a_cell_shows_each_kind_of_value() -> None:
    texts = Page(table(list("abcde"), [[None, True, 3, 0.1234567, "name"]])).texts
    assert texts == ["a", "b", "c", "d", "e", "true", "3", "0.12346", "name"]


def test_numbers_are_aligned_to_the_right() -> None:
    page = table(["a"], [[12], [0.5], ["12"], [True]])
    assert re.findall(r"text-align:(\w+);[^>]*>([\w.]+)</td>", page) == [
        ("right", "12"),
        ("right", "0.5"),
        ("left", "12"),
        ("left", "true"),
    ]


def test_no_colour_is_fixed() -> None:
    page = View("title", ["a"], [["b"]], lines=["c"]).as_html()
    assert not re.search(r"background|#[0-9a-f]{3}|rgb|\bwhite\b(?!-space)|black", page)
