"""`tokens` and `heads` in a file: their forms, and their mistakes with the key path."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from hookrun.engine.spec import parse_spec
from hookrun.engine.spec.heads import Heads, HeadsClause
from hookrun.engine.spec.hook import HookKeys
from hookrun.errors import SpecError


def keys_of(**given: Any) -> HookKeys:
    spec = parse_spec({"h": {"select": "fc", "hook": "forward", "action": "capture", **given}})
    return spec.hooks[0].keys


def test_forms_of_tokens_are_shown_as_read() -> None:
    forms: dict[str, Any] = {
        "-1": -1,
        "[0, 4:8, -1]": [0, "4:8", -1],
        "all": "all",
        "2::3": "2::3",
        "{phase: prompt}": {"phase": "prompt"},
        "{id: [198, 628]}": {"id": [198, 628]},
        "{text:  Paris}": {"text": " Paris"},
        "{span: subject}": {"span": "subject"},
        "{position: 0:5, phase: generation, exclude: {id: 5}, missing: skip}": {
            "phase": "generation",
            "position": {"start": 0, "end": 5},
            "exclude": {"id": 5},
            "missing": "skip",
        },
        "{query: -1, key: 0}": {"query": -1, "key": 0},
    }
    assert {shown: str(keys_of(tokens=raw).tokens) for shown, raw in forms.items()} == {
        shown: shown for shown in forms
    }
    assert str(keys_of(tokens="-1").tokens) == "-1"
    assert keys_of(tokens=None).tokens is None
    plain = parse_spec(
        {"h": {"select": "fc", "hook": "forward", "action": "capture", "tokens": -1, "heads": 3}}
    )
    assert plain.hooks[0].to_dict()["tokens"] == {"position": "-1"}
    assert plain.hooks[0].to_dict()["heads"] == {"pick": [3]}


def test_mistakes_in_tokens_are_reported_at_their_key() -> None:
    wrong: list[tuple[Any, str, str]] = [
        ({"phase": "generation", "position": -1}, "tokens", "found -1 under `phase: generation`"),
        ({"phase": "generation", "exclude": -2}, "tokens", "exclude.position: found -2"),
        ({"posision": 3}, "tokens.posision", "unknown key"),
        ({"phase": "promt"}, "tokens.phase", "'prompt'"),
        ({}, "tokens", "found an empty mapping"),
        ([], "tokens", "found an empty list"),
        (True, "tokens", "found True"),
        ("last", "tokens", "expected a position like -1"),
        (1.5, "tokens", "expected a position like -1"),
        ("8:4", "tokens", "the range ends before it begins"),
        ("1:9:0", "tokens", "the step of a range is at least 1"),
        (10**30, "tokens", "64 bits"),
        ({"id": -1}, "tokens.id.0", "greater than or equal to 0"),
        ({"position": {"stop": 3}}, "tokens.position", "expected start, end or every"),
        ({"query": 0, "dim": 2}, "tokens", "dim does not go with query and key"),
        ({"query": 0, "phase": "prompt"}, "tokens", "phase does not go with query and key"),
        ({"position": 0, "dim": 0}, "tokens.dim", "greater than or equal to 1"),
        ({"padding": "yes"}, "tokens.padding", "found"),
    ]
    for raw, where, what in wrong:
        with pytest.raises(SpecError) as found:
            keys_of(tokens=raw)
        [problem] = found.value.errors
        assert problem.where == f"hooks.h.{where}", (raw, problem)
        assert what in str(problem), (raw, problem)


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
    assert str(heads) == text
    assert heads.model_dump(mode="json", exclude_unset=True) == plain
    assert CLAUSE.validate_python(plain) == heads


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ([3, 3], "names head 3 twice"),
        ({"pick": [4], "count": 4}, "there is no head 4 among 4, which are 0 to 3"),
        ({"pick": [-5], "count": 4}, "there is no head -5"),
        ({"pick": [1, -3], "count": 4}, "from the start and from the end"),
        ({"count": 0, "pick": [0]}, "greater than or equal to 1"),
        ([], "at least 1 item"),
        (True, "expected the numbers of heads"),
        ("3", "expected the numbers of heads"),
        ([1.0], "valid integer"),
        ({"pick": [1], "dim": 0}, "greater than or equal to 1"),
    ],
)
def test_repeated_heads_are_refused(raw: Any, reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        CLAUSE.validate_python(raw)


def test_missing_heads_are_reported_if_the_count_is_known() -> None:
    heads = CLAUSE.validate_python([1, -3])
    assert heads.misfit(8) is None
    assert "twice" in str(heads.misfit(4))
    assert "no head -3" in str(heads.misfit(2))
