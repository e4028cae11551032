"""The README's tables say what the code does."""

from __future__ import annotations

from pathlib import Path

import pytest
from reference import OF_RANKS, RANKS, TABLES, updated

from hookrun.actions import actions
from hookrun.hook_types import HOOK_TYPES

README = Path(__file__).parents[1] / "README.md"


def test_the_readme_is_current() -> None:
    text = README.read_text(encoding="utf-8")
    assert updated(text) == text, "run scripts/reference"


def test_the_joint_table_is_current() -> None:
    text = (README.parent / RANKS).read_text(encoding="utf-8")
    assert updated(text, OF_RANKS) == text, "run scripts/reference"


def test_every_action_and_every_hook_type_has_a_row() -> None:
    assert all(f"| `{name}` |" in TABLES["actions"]() for name in actions())
    assert all(f"| `{name}` |" in TABLES["hook types"]() for name in HOOK_TYPES)


def test_parameters_stand_with_the_defaults_that_yaml_would_give_them() -> None:
    (row,) = (line for line in TABLES["actions"]().splitlines() if line.startswith("| `stats`"))
    assert "`of: [mean, std, min, max, norm]`" in row


def test_a_stale_table_is_replaced_and_the_text_around_it_stays() -> None:
    text = README.read_text(encoding="utf-8")
    stale = text.replace("| `clamp` |", "| `clump` |")
    assert stale != text
    assert updated(stale) == text


def test_a_readme_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="reference: hook types"):
        updated("# a readme")
