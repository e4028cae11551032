"""The modules of a model as a table for Python and notebooks: what task=modules shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hookrun.engine.html import Shown, View, text_console
from hookrun.engine.plan.plan import Match, ResolvedPlan
from hookrun.errors import Lookup, counted, listed, printable, shortened
from hookrun.run.tasks.modules import tree_of
from hookrun.store.tables import as_table

_ANY = 100_000
"""Width in characters that is enough for any tree."""

HEADS = ("path", "class", "parameters", "input", "output", "selected")


class ModuleRow(NamedTuple):
    """One module of a model.

    path:       its first name in ``named_modules``; empty for the model itself
    type:       its class
    parameters: number of elements of its parameters, with those of the modules inside
    input, output: shapes with the example; None: not known, or there is no example
    selected:   whether the selector matches it
    """

    path: str
    type: str
    parameters: int
    input: str | None
    output: str | None
    selected: bool


class ModuleTable(Shown):
    """The modules of a model in its order: iterate over them, or ask for one by any of its names. `str()` is the tree.

    picked:    the modules that the selector matches; if it matches none, the parameters
    unchecked: why shapes are not known; None if they are, or if there is no example
    """

    def __init__(
        self,
        plan: ResolvedPlan,
        matches: Mapping[str, Match],
        inputs: Mapping[str, Match],
        select: str,
        picked: Sequence[str],
    ) -> None:
        self.picked = tuple(picked)
        self.unchecked = plan.unchecked
        self._matches = matches
        rows: dict[str, ModuleRow] = {}
        aliases: dict[str, str] = {}
        for path, match in matches.items():
            taken = inputs[path].shape
            rows[path] = ModuleRow(path, match.type, match.parameters, taken, match.shape, path in picked)
            aliases |= dict.fromkeys(match.names, path)
        self._rows = Lookup("module", f"the modules of {plan.model}", rows, aliases)
        sizes = f"{counted(len(rows), 'module')}, {counted(matches[''].parameters, 'parameter')}"
        self._title = f"modules of {plan.model}: {sizes}"
        if picked:
            names = listed([path or "(root)" for path in picked])
            self._title += f"; {shortened(select)} matches {len(picked):,}: {names}"
        if self.unchecked:
            self._title += f"; shapes unknown: {self.unchecked}"

    def __iter__(self) -> Iterator[ModuleRow]:
        return iter(self._rows.values())

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, path: str) -> ModuleRow:
        return self._rows[path]

    def _ipython_key_completions_(self) -> list[str]:
        return list(self._rows)

    def table(self) -> Any:
        """The rows as a pandas DataFrame. HookrunError if pandas is not installed."""
        columns = zip(*self, strict=True)  # the model itself is always there
        return as_table(dict(zip(HEADS, map(list, columns), strict=True)), "pandas")

    def __str__(self) -> str:
        console = text_console(_ANY)
        with console.capture() as captured:
            console.print(tree_of(self._matches, self._matches.keys(), frozenset(self.picked), "crop"))
        lines = [line.rstrip() for line in captured.get().splitlines()]
        return "\n".join([*lines, printable(self._title)])

    def _view(self) -> View:
        rows = [row._replace(path=row.path or "(root)") for row in self]
        shown = len(HEADS) if self.picked else len(HEADS) - 1
        return View(self._title, HEADS[:shown], [row[:shown] for row in rows])
