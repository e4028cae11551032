"""The keys at the root of an experiment are listed apart from the classes that validate them."""

from __future__ import annotations

from hookrun.config import ROOT_KEYS
from hookrun.spec import Settings


def test_every_section_is_listed_and_nothing_else() -> None:
    assert (*Settings.model_fields, "hooks") == ROOT_KEYS
