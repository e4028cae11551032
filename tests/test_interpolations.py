"""Interpolations are resolved with few resolvers, within limits, and only where a configuration is read."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from hookrun.config.interpolations import MAX_NESTED, RefusedInterpolation, guarded, resolved, unguarded


def test_the_environment_and_resolvers_of_an_application_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOKRUN_TEST_SECRET", "x")
    ran = list[str]()
    OmegaConf.register_new_resolver("of_an_application", lambda: ran.append("ran"))
    try:
        for text in (
            "${oc.env:HOOKRUN_TEST_SECRET}",
            "${of_an_application:}",
            "${oc.decode:'${of_an_application:}'}",
        ):
            cfg = OmegaConf.create({"a": text})
            with pytest.raises(RefusedInterpolation), guarded():
                _ = cfg.a
            with pytest.raises(RefusedInterpolation):
                resolved(cfg)
        assert ran == []
        with guarded(), unguarded():
            assert OmegaConf.create({"a": "${oc.env:HOOKRUN_TEST_SECRET}"}).a == "x"
        assert OmegaConf.create({"a": "${oc.env:HOOKRUN_TEST_SECRET}"}).a == "x", "outside it is OmegaConf's"
    finally:
        OmegaConf.clear_resolver("of_an_application")


def test_ordinary_ones_are_resolved_and_long_chains_are_not() -> None:
    assert resolved(OmegaConf.create({"a": 1, "b": ["${a}", "${oc.decode:'[2]'}"]})) == {
        "a": 1,
        "b": [1, [2]],
    }
    chain = {"a0": 1, **{f"a{n}": f"${{a{n - 1}}}" for n in range(1, MAX_NESTED + 3)}}
    with pytest.raises(ValueError, match="lead to one another"):
        resolved(OmegaConf.create(chain))


@pytest.mark.parametrize(
    "bomb",
    [
        {"a0": "x", **{f"a{n}": f"${{a{n - 1}}}" * 10 for n in range(1, 9)}},
        {"a0": [1] * 100, **{f"a{n}": [f"${{a{n - 1}}}"] * 9 for n in range(1, 9)}},
        {"a0": "x" * 60_000, "b": ["${a0}"] * 30},
        {"a0": "x" * 60_000, "b": "${a0}" * 30},
        {"a0": [1] * 100, **{f"a{n}": [f"${{oc.select:a{n - 1}}}"] * 9 for n in range(1, 9)}},
        {"a0": [1] * 3_000, "b": ["${a0}"] * 9},
    ],
    ids=["texts", "lists", "a long text in a list", "a long text in a text", "selections", "a wide list"],
)
def test_interpolations_that_multiply_are_refused_early(bomb: dict[str, Any]) -> None:
    with pytest.raises(RefusedInterpolation, match=r"more than 1,000 interpolations|too many values"):
        resolved(OmegaConf.create(dict(reversed(bomb.items()))))


def test_a_value_counts_once_for_each_interpolation_that_stands_for_it() -> None:
    wide = {"a": [1] * 6_000, "b": "${a}", "c": "${oc.select:d}", "d": [2] * 3_000}
    assert resolved(OmegaConf.create(wide))["b"] == [1] * 6_000


def test_a_text_that_names_itself_is_left_to_omegaconf() -> None:
    with pytest.raises(ValueError, match="Recursive interpolation"):
        resolved(OmegaConf.create({"a": "${a}"}))
