"""Sections of a configuration: frozen, without unknown keys."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from hookrun.spec.section import Section


class Oven(Section):
    heat: int = 180


def test_a_section_is_frozen_and_refuses_unknown_keys() -> None:
    oven = Oven()
    with pytest.raises(ValidationError, match="frozen"):
        oven.heat = 200  # type: ignore[misc]
    with pytest.raises(ValidationError, match="not permitted"):
        Oven.model_validate({"haet": 200})
