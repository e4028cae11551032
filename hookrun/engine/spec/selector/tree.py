"""The names of a model's modules or parameters, against which selectors are matched."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property


@dataclass(frozen=True, slots=True)
class Node:
    """A module, or a parameter, as selectors see it.

    path:       its name in ``named_modules(remove_duplicate=False)`` (the root's is empty) or ``named_parameters``
    types:      class name and qualified name of its class and of each base; for a parameter those of its module
    leaf:       it has no children; for a parameter: its module has none
    parameters: number of elements of its own and its descendants' parameters
    """

    path: str
    types: frozenset[str] = frozenset()
    leaf: bool = True
    parameters: int = 0


@dataclass(frozen=True)
class Tree:
    """Every path of a model's modules, or of its parameters, in the model's order.

    numbered: path of a container -> the names of its numbered children, in the container's order
    first: path -> the first name of the same object
    without_forward: paths that globs and conditions pass over; names, ``re:`` and ``type:`` find them
    modules: of parameters: the modules that they belong to, so that a selector of a module stands for its parameters
    points: path of what a hook adds at a module -> its selector, ``hook:NAME.POINT``; only that and its path find it
    """

    nodes: Mapping[str, Node]
    numbered: Mapping[str, Sequence[str]] = field(default_factory=dict)
    first: Mapping[str, str] = field(default_factory=dict)
    without_forward: Set[str] = frozenset()
    modules: Tree | None = None
    points: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of_names(cls, names: Iterable[str]) -> Tree:
        """The tree of names alone, of which nothing else is known."""
        return cls({name: Node(name) for name in names})

    @cached_property
    def whole(self) -> Tree:
        """The same tree, where globs pass over nothing."""
        return replace(self, without_forward=frozenset()) if self.without_forward else self

    @cached_property
    def dotted(self) -> Mapping[str, bytes]:
        """Each path in UTF-8, with a dot before each name."""
        return {path: _dotted(path) for path in self.nodes}

    def below(self, paths: Iterable[str], starts: Collection[str]) -> Iterable[tuple[str, bytes]]:
        """Each path with what follows each of the starts that it lies under or is, with a dot before each name."""
        if starts == {""} and paths is self.nodes:
            return self.dotted.items()
        return (
            (path, _dotted(path)[len(_dotted(start)) :])
            for path in paths
            for start in (path, *ancestors(path))
            if start in starts
        )

    def without(self, paths: Iterable[str], excluded: Iterable[str]) -> set[str]:
        """The paths, without any name of an object if one of its names is excluded."""
        first = self.first
        objects = {first.get(path, path) for path in excluded}
        return {path for path in paths if first.get(path, path) not in objects}


@dataclass(frozen=True)
class Names:
    """The names that a selector could have meant, for the hint if it matches nothing.

    parameters: empty unless the hook is for parameters
    points: the selectors of what hooks add; disabled_points: of what hooks would add that are not enabled
    """

    modules: Sequence[str]
    parameters: Sequence[str] = ()
    classes: Sequence[str] = ()
    points: tuple[str, ...] = ()
    disabled_points: Sequence[str] = ()

    @property
    def paths(self) -> list[str]:
        """Modules, then parameters, without the root's empty path."""
        return [path for path in (*self.modules, *self.parameters) if path]

    @property
    def children(self) -> list[str]:
        """The modules directly below the root, or all paths of a model without submodules."""
        return [path for path in self.modules if path and "." not in path] or self.paths


def ancestors(name: str) -> Iterator[str]:
    """Every module path that `name` lies under, the root's too: ``a.b.weight`` -> ``a.b``, ``a``, the empty path."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _dotted(path: str) -> bytes:
    return f".{path}".encode("utf-8", "replace") if path else b""
