"""A selector by path: exact, or a glob with braces and indexes."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import Any

from hookrun.errors import nearest
from hookrun.spec.selector.base import GLOB_PARTS, Parser, Selector
from hookrun.spec.selector.braces import alternatives
from hookrun.spec.selector.glob import GlobSet, compile_globs, parse_glob
from hookrun.spec.selector.tree import Names, Tree


@dataclass(frozen=True)
class PathSelector(Selector):
    """An exact path or a glob, with Python indexes over numbered children."""

    text: str
    globs: GlobSet = field(compare=False, repr=False)

    position = 0
    rows = {
        "layer4.0.conv1": "exact path; the empty string is the root module",
        "layer*.conv?": "glob: `*` and `?` stay inside one name between dots",
        "**.attn": "`**` spans any number of names, including zero",
        "{q,k,v}_proj": "alternatives, at most 1,000, nested at most 32 deep",
        "h[0:4].mlp": "Python index or slice over the numbered children of a container, in their order; "
        "on parameter hooks over numbered parameters too",
    }

    @classmethod
    def reads(cls, raw: Any) -> bool:
        return isinstance(raw, str)

    @classmethod
    def parse(cls, raw: Any, parser: Parser) -> Selector:
        texts = alternatives(raw)
        parser.count(len(texts) - 1)
        globs = compile_globs(map(parse_glob, texts))
        if not globs.exact:
            parser.count(GLOB_PARTS * (1 + len(globs.wildcards)))
        return cls(raw, globs)

    @classmethod
    def schema(cls) -> dict[str, Any]:
        return {"type": ["string", "integer"], "description": "path or glob"}

    def find(self, tree: Tree) -> set[str]:
        if self.text in tree.nodes:  # an exact name wins, also if it looks like a glob
            return {self.text}
        return self.globs.find(tree)

    def nearest(self, names: Names) -> str:
        if difflib.get_close_matches(self.text, names.paths, n=1):
            return nearest(self.text, names.paths)
        last = self.text.rpartition(".")[2].strip("*?").lower()
        containing = [path for path in names.paths if last and last in path.lower()]
        return nearest(self.text, containing or names.children)
