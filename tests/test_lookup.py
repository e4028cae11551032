"""A mapping whose errors for missing keys name similar keys."""

from __future__ import annotations

from typing import Any

import pytest

from hookrun.errors import HookrunError, Lookup


def test_a_key_or_its_alias_is_found_and_a_missing_one_is_an_error_with_similar_keys() -> None:
    found: Any = Lookup("module", "the run", {"conv1": 1, "fc": 2, "b": 3}, {"a": "fc", "b": "conv1"})
    assert (found["fc"], found["a"], found["b"]) == (2, 2, 3), "a key comes before an alias of that name"
    assert list(found) == ["conv1", "fc", "b"] and len(found) == 3 and "a" in found
    with pytest.raises(KeyError, match="no module 'conv2' in the run") as missing:
        found["conv2"]
    assert isinstance(missing.value, HookrunError) and "conv1" in str(missing.value)
    with pytest.raises(KeyError, match="one module per name"):
        found[0]
    assert found.get("conv2") is None
