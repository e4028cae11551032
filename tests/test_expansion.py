"""The size of a configuration with its interpolations expanded, before any is resolved."""

from __future__ import annotations

from typing import Any

import pytest

from hookrun.expansion import Size, TooLarge, expanded


def test_a_value_counts_for_each_interpolation_that_refers_to_it() -> None:
    assert expanded({"a": [1, "two"]}) == Size(), "nothing is expanded without an interpolation"
    # the mapping, the list and its members, and once more for the interpolation
    assert expanded({"a": [1, "xy"], "b": "${a}"}) == Size(resolved=1, values=8, characters=2 + 4 + 2)
    assert expanded({"a": {"b": "x", "c": "${.b}"}}).resolved == 1
    assert expanded({"a": "${a}"}).resolved < 5, "what leads to itself is left to OmegaConf"


def test_exponential_interpolations_are_refused_before_they_are_resolved() -> None:
    bombs: list[dict[str, Any]] = [
        {"a0": "x", **{f"a{n}": f"${{a{n - 1}}}" * 10 for n in range(1, 9)}},
        {"a0": [1] * 100, **{f"a{n}": [f"${{a{n - 1}}}"] * 9 for n in range(1, 9)}},
        {"a0": "x" * 60_000, "b": ["${a0}"] * 30},
        {"a0": 1, **{f"a{n}": f"${{a{n - 1}}}" for n in range(1, 40)}},
        {"a0": [1] * 100, **{f"a{n}": [f"${{oc.select:a{n - 1}}}"] * 9 for n in range(1, 9)}},
    ]
    for bomb in bombs:
        with pytest.raises(TooLarge):
            expanded(dict(reversed(bomb.items())))
