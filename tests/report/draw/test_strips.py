"""Token strips: one scale of colours over all sequences, and all numbers as a table."""

from __future__ import annotations

import re

from hookrun.report.draw.strips import Strip, strips


def test_equal_values_have_equal_colours_in_every_sequence_and_none_is_not_coloured() -> None:
    first = Strip("val sample 0", ["a", "<b>"], [0, 1], [1.0, None], [("x",), ("y",)])
    second = Strip("val sample 1", ["c", "d"], [3, 4], [0.0, 1.0], [("x",), ("y",)])
    figure = strips("t", [first, second], what="loss", note="n", ends=("low", "high"), heads=("target",))
    styles = re.findall(
        r"<span (?:class=\"on-\w+\" style=\"([^\"]*)\" )?title=\"([^\"]*)\">(.*?)</span>", figure.picture
    )
    assert [text for _, _, text in styles] == ["a", "&lt;b&gt;", "c", "d"]
    assert styles[0][0] == styles[3][0] != styles[2][0] and styles[1][0] == ""
    assert styles[1][1] == "1 · y · –"
    assert figure.table is not None
    assert figure.table.heads == ("sample", "position", "token", "target", "loss")
    assert figure.table.rows[2] == ("val sample 1", "3", "c", "x", "0")
