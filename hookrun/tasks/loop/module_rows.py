"""The module tree of a model as aligned lines of text, down to a given depth."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from hookrun.plan.plan import Match

_GUIDES = {True: ("│   ", "    ", "├── ", "└── "), False: ("|   ", "    ", "|-- ", "`-- ")}
_GAP = "  "
MORE = "…"


@dataclass(frozen=True)
class ModuleRows:
    """The lines, and the number of modules that they do not show."""

    lines: list[str]
    hidden: int


def module_rows(
    matches: Sequence[Match], picked: Collection[str], *, depth: int | None, width: int | None, plain: bool
) -> ModuleRows:
    """A line for each module in the model's order: name, class, parameters, output shape, further names.

    picked: paths that are marked with ``*``, and shown at any depth
    depth:  the number of levels below the root; None: all
    width:  the largest length of a line; a longer line is cut and ends with ``…``; None: no limit
    plain:  use ASCII instead of line-drawing characters
    """
    children = defaultdict[str, list[Match]](list)
    for match in matches:
        if match.path:
            children[match.path.rpartition(".")[0]].append(match)
    wanted = {path for each in picked for path in _with_parents(each)}
    shown = [
        match for match in matches if depth is None or level(match.path) <= depth or match.path in wanted
    ]
    paths = {match.path for match in shown}
    guides = _guides({parent: [each for each in of if each.path in paths] for parent, of in children.items()})
    names, classes, sizes, ends = [], [], [], []
    for match in shown:
        mark = "* " if match.path in picked else ""
        names.append(f"{guides[match.path].text(plain)}{mark}{match.path.rpartition('.')[2] or '(root)'}")
        classes.append(match.type)
        sizes.append(f"{match.parameters:,}")
        ends.append(f"{match.shape or '-'}{_also(match)}{_below(match.path, children, paths)}")
    name_width, class_width, size_width = (max(map(len, column)) for column in (names, classes, sizes))
    lines = [
        _GAP.join([name.ljust(name_width), cls.ljust(class_width), size.rjust(size_width), end])
        for name, cls, size, end in zip(names, classes, sizes, ends, strict=True)
    ]
    return ModuleRows([_cut(line, width) for line in lines], len(matches) - len(shown))


def level(path: str) -> int:
    """The depth of a module path; 0 for the root."""
    return path.count(".") + 1 if path else 0


def fitting_depth(matches: Sequence[Match], lines: int) -> int:
    """The deepest level down to which all modules fit into `lines` lines; at least 1."""
    levels = sorted(level(match.path) for match in matches)
    deepest = levels[-1]
    return next(
        (depth for depth in range(deepest, 1, -1) if sum(each <= depth for each in levels) <= lines), 1
    )


def _with_parents(path: str) -> Iterator[str]:
    """The paths of the modules that contain this module, and its own."""
    parts = path.split(".")
    yield from (".".join(parts[:count]) for count in range(1, len(parts) + 1))


@dataclass(frozen=True)
class _Guide:
    """The tree lines before a module's name.

    parents: for each parent, whether further modules follow it at its level
    is_last: whether the module is the last of its parent; None: the root
    """

    parents: tuple[bool, ...] = ()
    is_last: bool | None = None

    def text(self, plain: bool) -> str:
        down, gap, branch, end = _GUIDES[not plain]
        before = "".join(down if follow else gap for follow in self.parents)
        return before + ("" if self.is_last is None else end if self.is_last else branch)


def _guides(children: dict[str, list[Match]]) -> dict[str, _Guide]:
    found, left = {"": _Guide()}, [""]
    while left:
        parent = left.pop()
        guide = found[parent]
        of = children.get(parent, [])
        parents = guide.parents if guide.is_last is None else (*guide.parents, not guide.is_last)
        for place, match in enumerate(of):
            found[match.path] = _Guide(parents, place + 1 == len(of))
            left.append(match.path)
    return found


def _also(match: Match) -> str:
    others = [path for path in match.names if path != match.path]
    return f"  (also {', '.join(others)})" if others else ""


def _below(path: str, children: dict[str, list[Match]], shown: set[str]) -> str:
    count, left = 0, [path]
    if any(each.path in shown for each in children.get(path, [])):
        return ""
    while left:
        of = children.get(left.pop(), [])
        count += len(of)
        left += [each.path for each in of]
    return f"  (+{count} below)" if count else ""


def _cut(line: str, width: int | None) -> str:
    line = line.rstrip()
    return line if width is None or len(line) <= width else f"{line[: max(width - 1, 1)]}{MORE}"
