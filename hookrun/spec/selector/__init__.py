"""Selectors: which modules or parameters a hook is for. Parsed once, matched against names alone.

Each form is a class in a module of this package, found by `forms`: a new one is a new module. Imports no torch.
"""

from hookrun.spec.selector.base import Selector, Unmatched
from hookrun.spec.selector.registry import (
    AnySelector,
    forms,
    parse_selector,
    reference_rows,
    select_schema,
)
from hookrun.spec.selector.tree import Names, Node, Tree

__all__ = [
    "AnySelector",
    "Names",
    "Node",
    "Selector",
    "Tree",
    "Unmatched",
    "forms",
    "parse_selector",
    "reference_rows",
    "select_schema",
]
