"""An error names the interpolation from which a value came."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from hookrun.cli.origins import MOST_SHOWN, origins_told
from hookrun.errors import Problem, SpecError


def told(config: object, where: str, what: str) -> str:
    with pytest.raises(SpecError) as refused, origins_told(OmegaConf.create(config)):
        raise SpecError([Problem(where, what)])
    (problem,) = refused.value.errors
    assert problem.where == where
    return problem.what


def test_the_interpolation_of_a_value_or_of_its_section_is_named() -> None:
    config = {"seed": "${a}", "hooks": {"x": "${b}", "y": {"of": ["${c}"]}}}
    assert told(config, "seed", "found 'x': expected 1") == "found 'x' (from ${a}): expected 1"
    assert told(config, "seed", "found 'x', expected 1") == "found 'x' (from ${a}), expected 1"
    assert told(config, "hooks.y.of.0", "is missing") == "is missing (from ${c})"
    assert told(config, "hooks.x.select", "is missing") == "is missing (hooks.x is ${b})"
    assert told(config, "hooks.y", "is missing") == "is missing", "it is no interpolation itself"
    long = told({"seed": "${a}" * 1_000}, "seed", "is wrong")
    assert len(long) < MOST_SHOWN + 40 and long.endswith("…)")
