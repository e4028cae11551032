"""Selection by class: names of a class and its bases, qualified or not, as globs, with alternatives in braces."""

from __future__ import annotations

import pytest

from hookrun.spec.selector import Node, Tree, parse_selector

CONV = frozenset({"Conv2d", "torch.nn.modules.conv.Conv2d", "Module"})
LINEAR = frozenset({"Linear", "torch.nn.modules.linear.Linear"})
TREE = Tree(
    {"": Node(""), "conv": Node("conv", CONV), "fc": Node("fc", LINEAR), "h.conv": Node("h.conv", CONV)}
)


@pytest.mark.parametrize(
    ("raw", "paths"),
    [
        ("type:Conv2d", ["conv", "h.conv"]),
        ("type:Module", ["conv", "h.conv"]),  # a base
        ("type:torch.nn.modules.linear.*", ["fc"]),
        ("type:{Linear,Conv?d}", ["conv", "fc", "h.conv"]),
        ("type:[L]inear", ["fc"]),
        ("type:Lin", []),
        ("type:linear", []),
    ],
)
def test_a_class_selects_its_modules(raw: str, paths: list[str]) -> None:
    assert parse_selector(raw).select(TREE) == paths


def test_a_class_without_a_name_is_refused() -> None:
    for raw in ("type:", "type: ", "type:{Linear,}"):
        with pytest.raises(ValueError, match="without a class name"):
            parse_selector(raw)
