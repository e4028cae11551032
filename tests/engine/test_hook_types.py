"""Each hook type is one record with all of its properties."""

from __future__ import annotations

import copy
import pickle

import pytest

from hookrun.engine.hook_types import HOOK_TYPES, ON_VALUES, OWN_KEYS


def test_every_hook_type_is_found_by_its_name() -> None:
    assert len(HOOK_TYPES) >= 10
    for name, each in HOOK_TYPES.items():
        assert pickle.loads(pickle.dumps(each)) is copy.deepcopy(each) is each
        assert each.name == name
        assert each.fires, name
        assert each.sees, name
        assert not each.fires.endswith("."), name
        assert (each in ON_VALUES) is (each.phase != "installation"), name
        assert each.phase == "installation" or "when" in each.takes, name
    assert any(OWN_KEYS & each.takes for each in HOOK_TYPES.values())


def test_no_hook_types_can_be_added_from_outside() -> None:
    with pytest.raises(TypeError):
        HOOK_TYPES["mine"] = HOOK_TYPES["forward"]  # type: ignore[index]
