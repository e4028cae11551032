"""The reference tables, from the code: hook types, actions and selectors in README.md, ranks in hookrun/ranks."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from pydantic_core import PydanticUndefined

from hookrun.actions import Action, actions
from hookrun.hook_types import HOOK_TYPES
from hookrun.spec.selector import reference_rows


def hook_types() -> str:
    """When each hook type fires, and what its action sees."""
    return _table(
        ("hook", "fires", "the action"),
        ((f"`{name}`", kind.fires, f"sees {kind.sees}") for name, kind in HOOK_TYPES.items()),
    )


def action_table() -> str:
    """What each action does, its parameters with their defaults, and the hook types that carry it."""
    return _table(
        ("action", "what it does", "parameters", "hook types"),
        (
            (f"`{name}`", _first_line(action), _parameters(action), _carriers(action))
            for name, action in actions().items()
        ),
    )


def selectors() -> str:
    """The forms of a selector."""
    return _table(("form", "matches"), ((f"`{form}`", meaning) for form, meaning in reference_rows().items()))


TABLES: Mapping[str, Callable[[], str]] = {
    "hook types": hook_types,
    "actions": action_table,
    "selectors": selectors,
}


def ranks() -> str:
    """What comes of every action on every hook type in several processes, sharded and compiled."""
    from joint_table import joint_table

    return joint_table()


OF_RANKS: Mapping[str, Callable[[], str]] = {"joint table": ranks}
RANKS = Path("hookrun", "ranks", "README.md")
"""Beside README.md."""


def updated(text: str, tables: Mapping[str, Callable[[], str]] = TABLES) -> str:
    """A text with each table between its markers as the code has it now. Raises ValueError where markers lack."""
    for name, table in tables.items():
        begin, end = f"<!-- reference: {name} -->", f"<!-- end of reference: {name} -->"
        if text.find(end) < text.find(begin) or begin not in text:
            raise ValueError(f"there is no {begin} ... {end}")
        start, _, rest = text.partition(begin)
        text = f"{start}{begin}\n{table()}\n{end}{rest.partition(end)[2]}"
    return text


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)


def _first_line(action: type[Action]) -> str:
    return inspect.cleandoc(action.__doc__ or "").partition("\n")[0].rstrip(".")


def _parameters(action: type[Action]) -> str:
    shown = []
    for name, info in action.model_fields.items():
        default = info.default
        plain = list(default) if isinstance(default, tuple) else default
        shown.append(
            f"`{name}`" if default is PydanticUndefined or default is None else f"`{name}: {_yaml(plain)}`"
        )
    return ", ".join(shown)


def _yaml(value: object) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_yaml, value)) + "]"
    return (
        str(value).lower()
        if isinstance(value, bool)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )


def _carriers(action: type[Action]) -> str:
    carried = [f"`{name}`" for name, kind in HOOK_TYPES.items() if kind in action.hook_types]
    missing = sorted(f"`{name}`" for name, kind in HOOK_TYPES.items() if kind not in action.hook_types)
    if not missing:
        return "all"
    return "all but " + ", ".join(missing) if len(missing) < len(carried) else ", ".join(carried)


def main() -> int:
    """Bring a README up to date, or with ``--check`` say whether it is."""
    parser = argparse.ArgumentParser(description="Write the reference tables into a README.")
    parser.add_argument("readme", type=Path)
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit with 1 where the tables are stale"
    )
    args = parser.parse_args()
    stale = 0
    for path, tables in ((args.readme, TABLES), (args.readme.parent / RANKS, OF_RANKS)):
        text = path.read_text(encoding="utf-8")
        current = updated(text, tables)
        if not args.check:
            path.write_text(current, encoding="utf-8")
        elif current != text:
            print(f"{path} is stale: run scripts/reference")
            stale = 1
    if args.check and not stale:
        print("current")
    return stale


if __name__ == "__main__":
    raise SystemExit(main())
