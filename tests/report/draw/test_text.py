"""Numbers, times and names as text; names may contain any characters."""

from __future__ import annotations

import math

from hookrun.report.draw import text


def test_numbers() -> None:
    shown = {
        0.88214: "0.8821", 1.2e-5: "1.2e-05", 12345: "12,345", 3.0: "3", 1e7: "1e+07", -0.5: "-0.5",
        math.inf: "∞", -math.inf: "−∞", None: "–", True: "True", "a": "a",
    }  # fmt: skip
    assert {value: text.number(value) for value in shown} == shown
    assert text.number(math.nan) == "NaN"


def test_ticks_are_short() -> None:
    assert [text.tick(value) for value in (15e3, 2e7, 1e-5, 0.5, 3e9, 1e15)] == [
        "15k", "20M", "1e-5", "0.5", "3G", "1e+15",
    ]  # fmt: skip


def test_durations_and_times() -> None:
    found = [text.duration(seconds) for seconds in (0.94, 200, 59.96, 7500, 3 * 86400 + 7200)]
    assert found == ["0.9 s", "3 min 20 s", "60.0 s", "2 h 05 min", "3 d 2 h"]
    assert text.moment("2026-01-02T05:06:07+02:00") == "2026-01-02 03:06 UTC"
    assert text.moment(None) == text.moment("soon") == "–"
    assert text.seconds_between("2026-01-01T00:00:00+00:00", "2026-01-01T00:01:00+00:00") == 60
    assert text.seconds_between("2026-01-01T00:01:00+00:00", "2026-01-01T00:00:00+00:00") == 0
    assert text.seconds_between(None, "x") is None
    assert text.seconds_between("2026-01-01T00:00:00", "2026-01-01T00:00:00+00:00") is None


def test_names_are_shortened_and_have_no_control_characters() -> None:
    assert text.one_line("a\u202eb\n\ud800") == r"a\u202eb\n\ud800"
    assert text.visible("a\x1b\n\tb") == "a\\x1b\n\tb"
    assert text.shortened("a" * 50 + "b" * 50, 20) == "a" * 10 + "…" + "b" * 10
    assert (text.module_name(""), text.module_name("a.b")) == ("(root)", "a.b")


def test_tokens_show_the_space_before_them() -> None:
    assert text.token_name("  the", 5) == "␣␣the"
    assert text.token_name("", 5) == "#5" and text.token_name("", -1) == "?"
    assert len(text.token_name("x" * 99, 5)) == 40
