"""`heads`: numbers of attention heads, each named once."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from hookrun.spec.heads import Heads, HeadsClause

CLAUSE = TypeAdapter[Heads](HeadsClause)


@pytest.mark.parametrize(
    ("raw", "text", "plain"),
    [
        (3, "[3]", {"pick": [3]}),
        ([3, -1], "[3, -1]", {"pick": [3, -1]}),
        ({"pick": 0, "count": 4}, "{count: 4, pick: [0]}", {"pick": [0], "count": 4}),
        ({"pick": [0], "dim": 2}, "{dim: 2, pick: [0]}", {"pick": [0], "dim": 2}),
    ],
)
def test_a_number_a_list_or_a_mapping(raw: Any, text: str, plain: dict[str, Any]) -> None:
    heads = CLAUSE.validate_python(raw)
    assert (str(heads), heads.to_dict()) == (text, plain)
    assert CLAUSE.validate_python(plain) == heads


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ([3, 3], "names head 3 twice"),
        ({"pick": [4], "count": 4}, "there is no head 4 among 4, which are 0 to 3"),
        ({"pick": [-5], "count": 4}, "there is no head -5"),
        ({"pick": [1, -3], "count": 4}, "from the start and from the end"),
        ([], "at least 1 item"),
        (True, "expected the numbers of heads"),
        ("3", "expected the numbers of heads"),
        ([1.0], "valid integer"),
        ({"pick": [1], "dim": 0}, "greater than or equal to 1"),
    ],
)
def test_no_heads_and_repeated_heads_are_refused(raw: Any, reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        CLAUSE.validate_python(raw)


def test_missing_heads_are_reported_if_the_count_is_known() -> None:
    heads = CLAUSE.validate_python([1, -3])
    assert heads.misfit(8) is None
    assert "twice" in str(heads.misfit(4))
    assert "no head -3" in str(heads.misfit(2))
