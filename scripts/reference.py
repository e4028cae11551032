"""Writes the tables of the pages on experiments, actions and ranks, and of the page for programs, from the code."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from pydantic_core import PydanticUndefined

from hookrun.engine.actions import Action, actions
from hookrun.engine.hook_types import HOOK_TYPES
from hookrun.engine.spec.hook import HookKeys
from hookrun.engine.spec.selector import reference_rows

CONF = Path(__file__).parents[1] / "conf"
EXAMPLES = CONF / "hooks"


def hook_types() -> str:
    """A table of the hook types: when each fires, and what its action sees."""
    return _table(
        ("hook", "fires", "the action"),
        ((f"`{name}`", kind.fires, f"sees {kind.sees}") for name, kind in HOOK_TYPES.items()),
    )


def action_table() -> str:
    """A table of the actions: what each does, its parameters with their defaults, and its hook types."""
    return _table(
        ("action", "what it does", "parameters", "hook types"),
        (
            (f"`{name}`", _first_line(action), _parameters(action), _carriers(action))
            for name, action in actions().items()
        ),
    )


def selectors() -> str:
    """A table of the selector forms."""
    return _table(("form", "matches"), ((f"`{form}`", meaning) for form, meaning in reference_rows().items()))


HOOK_KEYS = {
    "select": "required: which modules or parameters, see below",
    "hook": "required: when it fires, a hook type",
    "target": "which tensor of a tuple, list, dict or object: `[0]`, `logits`, `[0].logits`",
    "index": "which part of that tensor, in NumPy's notation: `..., 0:8`",
    "tokens": "which positions of a sequence, not counting padding: `-1`, `{phase: prompt}`",
    "heads": "which attention heads: `[3, 5]`",
    "batch_dim": "which dimension is the batch, where the trial run cannot show it",
    "when": "`{mode: train, step: {start: 100, every: 10}, epoch: [0, 1], call: 0, probability: 0.5}`",
    "expect": 'how many must match: `2`, `">=1"` (the default), `0..2`',
    "enabled": "`false` leaves the hook out",
    "priority": "lower fires first; ties in the order of the file",
    "parameters": "`saved_tensors` only: `true` for parameters as well",
}
"""Key of every hook -> what it says."""


def hook_keys() -> str:
    """One line for each key of a hook; a key without a meaning is a KeyError."""
    return "\n".join(f"- `{key}`: {HOOK_KEYS[key]}" for key in HookKeys.model_fields)


def hook_type_list() -> str:
    """One line for each hook type: when it fires, and what its action sees."""
    return "\n".join(f"- `{name}`: {kind.fires}; sees {kind.sees}" for name, kind in HOOK_TYPES.items())


def selector_list() -> str:
    """One line for each selector form, with the first clause of what it matches."""
    return "\n".join(f"- `{form}`: {said.partition('; ')[0]}" for form, said in reference_rows().items())


def action_list() -> str:
    """One line for each action: the names of its parameters, the first clause of what it does, and hook types other than usual."""
    lines = []
    for name, action in actions().items():
        given = ", ".join(action.model_fields)
        carried = _carriers(action)
        on = "" if carried == "all but `apply`" else f" On: {carried}."
        does = re.split("[:;] |, and ", _first_line(action))[0]
        lines.append(f"- `{name}`{f' ({given})' if given else ''}: {does}.{on}")
    return "\n".join(lines)


def task_list() -> str:
    """One line for each task: its keys, and what it does, from the head of its file."""
    from hookrun.run.tasks import tasks  # the tests of the engine alone import this file for its selectors
    from hookrun.run.tasks.under_hooks import TaskUnderHooks

    lines = []
    for name, task in tasks().items():
        comment = (CONF / "task" / f"{name}.yaml").read_text(encoding="utf-8")
        said = " ".join(re.match(r"(# .*\n)+", comment)[0].replace("# ", "").split())
        keys = [key for key in task.model_fields if key not in TaskUnderHooks.model_fields]
        given = f" ({', '.join(keys)})" if keys else ""
        lines.append(f"- `{name}`{given}: {re.split(r'(?<=[.?]) ', said)[0]}")
    return "\n".join(lines)


def action_pages() -> str:
    """Each action in full: its docstring with the parameters as a table, its hook types, its example."""
    return "\n\n".join(_page(name, action) for name, action in actions().items())


TABLES: Mapping[str, Callable[[], str]] = {"hook types": hook_types, "selectors": selectors}
"""The tables of the page on experiments."""


def ranks() -> str:
    """A table of all actions on all hook types: which are equal, differ or are refused in several processes."""
    from joint_table import joint_table

    return joint_table()


PAGES: Mapping[str, Mapping[str, Callable[[], str]]] = {
    "conf/README.md": TABLES,
    "hookrun/engine/actions/README.md": {"actions": action_table, "each action": action_pages},
    "hookrun/run/ranks/README.md": {"joint table": ranks},
    "hookrun/AGENTS.md": {
        "tasks": task_list,
        "hook keys": hook_keys,
        "hook types": hook_type_list,
        "selectors": selector_list,
        "actions": action_list,
    },
}
"""The generated parts of each file."""


def updated(text: str, tables: Mapping[str, Callable[[], str]] = TABLES) -> str:
    """The text with each table between its markers replaced. Raises ValueError if markers are missing."""
    for name, table in tables.items():
        begin, end = f"<!-- reference: {name} -->", f"<!-- end of reference: {name} -->"
        if text.find(end) < text.find(begin) or begin not in text:
            raise ValueError(f"there is no {begin} ... {end}")
        start, _, rest = text.partition(begin)
        text = f"{start}{begin}\n{table()}\n{end}{rest.partition(end)[2]}"
    return text


def _page(name: str, action: type[Action]) -> str:
    paragraphs = inspect.cleandoc(action.__doc__ or "").split("\n\n")
    parts = [f"### `{name}`"]
    for paragraph in paragraphs:
        found = dict(_PARAMETER.findall(paragraph))
        parts.append(_meanings(action, found) if found else " ".join(paragraph.split()))
    parts.append(f"On: {_carriers(action)}.")
    example = EXAMPLES / f"{name}.yaml"
    if example.exists():
        parts.append(f"```yaml\n{example.read_text(encoding='utf-8').strip()}\n```")
    return "\n\n".join(parts)


_PARAMETER = re.compile(r"^(\w+): +(.*(?:\n .*)*)", re.MULTILINE)
"""A parameter and its meaning in a docstring; further lines of the meaning are indented."""


def _meanings(action: type[Action], found: Mapping[str, str]) -> str:
    rows = []
    for name, meaning in found.items():
        info = action.model_fields[name]
        default = info.default
        plain = list(default) if isinstance(default, tuple) else default
        shown = (
            "required" if default is PydanticUndefined else "–" if default is None else f"`{_yaml(plain)}`"
        )
        rows.append((f"`{name}`", shown, " ".join(meaning.split())))
    return _table(("parameter", "default", "meaning"), rows)


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
    """Update the pages; with ``--check`` only print whether they are current. Returns the exit code."""
    parser = argparse.ArgumentParser(description="Write the reference tables into the pages of a checkout.")
    parser.add_argument("root", type=Path)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a page is stale")
    args = parser.parse_args()
    stale = 0
    for name, tables in PAGES.items():
        page = args.root / name
        text = page.read_text(encoding="utf-8")
        current = updated(text, tables)
        if args.check:
            stale |= current != text
            print(f"{name} is " + ("current" if current == text else "stale: run scripts/reference"))
        else:
            page.write_text(current, encoding="utf-8")
    return int(stale)


if __name__ == "__main__":
    raise SystemExit(main())
