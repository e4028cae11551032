"""Interpolations are resolved with few resolvers, within limits, and only where a configuration is read."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from hookrun.interpolations import MAX_NESTED, RefusedInterpolation, guarded, resolved, unguarded


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
