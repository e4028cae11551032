"""Which captures of two runs belong together, and in which order the dimensions of the other run's are read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hookrun.engine.spec.selector import paired
from hookrun.errors import spec_error
from hookrun.studies.compare.comparison.rows import Counts
from hookrun.studies.kit.files import Run, StoredCapture, captured_tensors, load_plain

Names = Mapping[Any, Any] | str | os.PathLike[str]
"""Globs of the first run's modules -> globs of the other run's; or a file that holds them."""

TRANSPOSE = "task.transpose"

_OTHER_DIRECTIONS = "0.5.0"
"""The version whose fingerprints are random projections in other directions than those of later ones."""

_ALONE = ("", "[0]")
"""The places of the only tensor, and of the first of a tuple: in two implementations they belong together."""


@dataclass(frozen=True)
class Pairing:
    """Which captures of two runs belong together.

    partners: module of the first run -> its partner in the other one; None: each belongs to that of the same name
    orders:   module of the other run -> the dimensions of its captures, rows first, in the order of the first run's
    counts:   hook -> what `Counts` says
    """

    partners: Mapping[str, str] | None
    orders: Mapping[str, Sequence[int]]
    counts: Mapping[str, Counts]

    @cached_property
    def _firsts(self) -> Mapping[str, str]:
        """Module of the other run -> its partner in the first one."""
        return {partner: module for module, partner in (self.partners or {}).items()}

    def partner(self, module: str) -> str | None:
        """The module of the other run that belongs to a module of the first run."""
        return module if self.partners is None else self.partners.get(module)

    def first(self, module: str) -> str | None:
        """The module of the first run that belongs to a module of the other run."""
        return module if self.partners is None else self._firsts.get(module)

    def paired(self, module: str) -> str | None:
        """The module of the first run itself; None if no module of the other one belongs to it."""
        return None if self.partner(module) is None else module

    def rows(self, modules: Iterable[str]) -> list[dict[str, Any]]:
        """A row for each of the first run's modules whose partner has another name, or another order of dimensions."""
        rows: list[dict[str, Any]] = []
        for module in modules:
            partner = str(self.partner(module))
            order = list(self.orders.get(partner, ()))
            if order or partner != module:
                rows.append({"module": module, "other": partner, "transpose": order or None})
        return rows

    def partner_of(self, capture: StoredCapture, other: Run) -> StoredCapture | None:
        """The capture of the same value in the other run."""
        module = self.partner(capture.module)
        modules: Mapping[str, Any] = other.captures.get(capture.hook, {})
        if module is None or module not in modules:
            return None
        leaf = modules[module]
        tensors = {"": leaf} if isinstance(leaf, StoredCapture) else leaf
        paths = _ALONE if self.partners is not None and capture.path in _ALONE else (capture.path,)
        return next((tensors[path] for path in paths if path in tensors), None)

    def is_expected(self, capture: StoredCapture, module: str | None, run: Run) -> bool:
        """Whether a run should have a partner of a capture: its module, or None, does not return a tensor alone."""
        if module is None or self.partners is None or not capture.path:
            return module is not None
        modules: Mapping[str, Any] = run.captures.get(capture.hook, {})
        return module not in modules or not isinstance(modules[module], StoredCapture)


def pairing_of(
    run: Run, other: Run, names: Names | None, transpose: Mapping[Any, Sequence[int]] | None
) -> Pairing:
    """How the modules of two runs are paired.

    Raises SpecError for names that do not fit the runs, and for orders that do not fit what they captured.
    """
    where = "task"
    given: Any = {"names": names or None}
    if isinstance(names, str | os.PathLike):
        where = str(names)
        given = load_plain(Path(names).expanduser())
        if not isinstance(given, dict) or not any(isinstance(value, dict) for value in given.values()):
            given = {"names": given}
    named = paired.Paired.of(given, where)
    typed = paired.Paired.of({"transpose": transpose or {}}, "task")
    counts = _counts(run, other)
    second = _side(other)
    orders = paired.chosen({**named.transpose, **typed.transpose}, second, TRANSPOSE)
    partners = None
    if named.names is not None:
        partners = paired.partners(named.names, _side(run), second, f"{where}.names")
    pairing = Pairing(partners, orders, counts)
    for capture in captured_tensors(run.captures):
        partner = pairing.partner_of(capture, other)
        if partner is not None and partner.module in orders:
            _require_order(orders[partner.module], capture, partner)
    return pairing


def _counts(run: Run, other: Run) -> dict[str, Counts]:
    """`counts` of a pairing. Raises SpecError where fingerprints cannot be compared with what the other run kept."""
    counts: dict[str, Counts] = {}
    first = _reductions(run)
    second = _reductions(other)
    for hook in first.keys() & second.keys():
        kept = first[hook], second[hook]
        projections = kept[0].get("fingerprint", 0), kept[1].get("fingerprint", 0)
        if any(projections) and all(kept) and kept[0] != kept[1]:
            what = f"{hook}: a run keeps {kept[0]} of its rows and the other one {kept[1]}, which cannot be compared"
            raise spec_error("task.other", what, "capture both with one `reduce`, or one of them whole")
        has_other_directions = [
            bool(count) and side.env.get("hookrun") == _OTHER_DIRECTIONS
            for count, side in zip(projections, (run, other), strict=True)
        ]
        if any(has_other_directions) and not all(has_other_directions):
            old = f"fingerprints of hookrun {_OTHER_DIRECTIONS}, which have other directions"
            raise spec_error("task.other", f"{hook}: one of the runs keeps {old}", "make that run again")
        if all(isinstance(count, int) for count in projections):
            counts[hook] = projections
    return counts


def _reductions(run: Run) -> dict[str, dict[str, Any]]:
    """Each hook -> what it keeps of the rows that it captures; empty: all."""
    reductions: dict[str, dict[str, Any]] = {}
    for hook in run.plan.get("hooks", ()):
        reduce = (hook.get("params") or {}).get("reduce")
        if not isinstance(reduce, dict):
            reduce = {}
        reductions[hook["name"]] = {key: value for key, value in reduce.items() if value is not None}
    return reductions


def _side(run: Run) -> paired.Side:
    """The modules of a run. Those are compared that it captured or has statistics of."""
    used = dict.fromkeys(capture.module for capture in captured_tensors(run.captures))
    used |= dict.fromkeys(line["module"] for line in run.stats if line.get("module") is not None)
    paths = dict.fromkeys(module["path"] for module in run.model.get("modules", ()))
    return paired.Side(str(run.path), paths | used, used)


def _require_order(order: Sequence[int], capture: StoredCapture, partner: StoredCapture) -> None:
    """Raise SpecError unless the other run's rows have these dimensions, and then the shape of the first run's."""
    shapes = [list(kind.shape[1:]) for kind in capture.by_kind()]
    for kind in partner.by_kind():
        is_order = order[:1] == (0,) and sorted(order) == list(range(len(kind.shape)))
        if not is_order or [kind.shape[dimension] for dimension in order[1:]] not in shapes:
            what = f"{list(order)} does not make rows of {shapes[0]} from those of {list(kind.shape[1:])}"
            hint = (
                "name each dimension of the other run's value once, as the first run has them; 0 is the rows"
            )
            raise spec_error(f"{TRANSPOSE}: {partner.label}", what, hint)
