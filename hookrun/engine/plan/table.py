"""The plan as a table: order, hook, modules, class, hook type, action, parameters, schedule, shapes."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from hookrun.engine.actions.fields import Meaning
from hookrun.engine.actions.values import is_by_sample
from hookrun.engine.html import MOST_ROWS, View, text_console
from hookrun.engine.plan.outside import Source, form
from hookrun.engine.plan.plan import SHOWN, Match, PlannedHook, ResolvedPlan, each_once
from hookrun.engine.spec.hook import argument as argument
from hookrun.engine.spec.hook import parameters
from hookrun.engine.trust.callables import Code
from hookrun.errors import counted, first_lines, listed, printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_ANY = 10_000
"""Width in characters that is enough for any table."""

HEADS = ("hook", "modules", "class", "hook type", "action", "parameters", "when", "shape")
Column = tuple[str, Mapping[str, str]]
"""An additional column: its heading, and hook name -> text."""


def table(plan: ResolvedPlan, limit: int | None = None, more: Column | None = None) -> Table:
    """The plan as a rich table, with at most `limit` modules of each hook."""
    from rich import box
    from rich.table import Table

    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    drawn.add_column("#", justify="right", no_wrap=True)
    for name in HEADS:
        drawn.add_column(name, no_wrap=True)
    if more is not None:
        drawn.add_column(more[0], no_wrap=True)
    for order, hook in enumerate(plan.hooks):
        spec = hook.spec
        cells = [
            str(order),
            spec.name,
            "\n".join(_limited([shown_name(match) for match in hook.matches], limit)),
            "\n".join(_limited([match.type for match in hook.matches], limit)),
            spec.hook_type.name,
            spec.action.action_name,
            parameters(spec),
            str(spec.keys.when),
            "\n".join(_limited([match.shape or "-" for match in hook.matches], limit)),
        ]
        if more is not None:
            cells.append(more[1].get(spec.name, ""))
        drawn.add_row(*cells)
    return drawn


def text(plan: ResolvedPlan) -> str:
    """The plan as plain text of any width, with some modules of each hook."""
    console = text_console(_ANY)
    with console.capture() as captured:
        show(plan, console, SHOWN)
    shown = printable(captured.get(), kept="\n")
    return "\n".join(line.rstrip() for line in shown.split("\n")).strip("\n")


def view_of(plan: ResolvedPlan) -> View:
    """The plan for notebooks: a row for each of the first modules of each hook."""
    rows: list[Sequence[str | int]] = []
    count = 0
    limit = max(MOST_ROWS // max(len(plan.hooks), 1), 1)
    for order, hook in enumerate(plan.hooks):
        spec = hook.spec
        first: list[str | int] = [order, spec.name]
        doing = [spec.hook_type.name, spec.action.action_name, parameters(spec), str(spec.keys.when)]
        for match in hook.matches[:limit]:
            rows.append([*first, shown_name(match), match.type, *doing, match.shape or ""])
            first = ["", ""]
            doing = [""] * len(doing)
        if not hook.matches:
            rows.append([*first, "", "", *doing, ""])
        count += max(len(hook.matches), 1)
    title = f"plan {plan.hash[:12]}: {counted(len(plan.hooks), 'hook')} on {plan.model}"
    return View(title, ("#", *HEADS), rows, count, notes(plan)[:-1])  # its hash is in the title


def show(plan: ResolvedPlan, console: Console, limit: int | None = None, more: Column | None = None) -> None:
    """Print the plan, with at most `limit` modules of each hook.

    In a terminal that is too narrow for the table, a few lines for each hook are printed instead; also in a file, if
    COLUMNS is set to a smaller width.
    """
    from rich.segment import SegmentLines

    drawn = table(plan, limit, more)
    width = console.measure(drawn, options=console.options.update(width=_ANY)).maximum
    is_limited = console.is_terminal or os.environ.get("COLUMNS", "").isdecimal()
    if plan.hooks and (not is_limited or width <= console.width):
        narrow = console.width
        console.width = max(width, console.width)
        # without the edge above the headings, which is blank
        console.print(SegmentLines(console.render_lines(drawn)[1:], new_lines=True))
        console.width = narrow
    else:
        for order, hook in enumerate(plan.hooks):
            console.print("\n".join(_card(order, hook, limit)), soft_wrap=True)
            if more is not None and more[1].get(hook.spec.name):
                console.print(f"   {more[0]}: {more[1][hook.spec.name]}", soft_wrap=True)
    for line in notes(plan):
        console.print(line, soft_wrap=True)


def _card(order: int, hook: PlannedHook, limit: int | None) -> list[str]:
    spec = hook.spec
    parts = [spec.hook_type.name, spec.action.action_name, parameters(spec), str(spec.keys.when)]
    matches = [f"{shown_name(match)}  {match.type}  {match.shape or '-'}" for match in hook.matches]
    shown = [f"   {line}" for line in _limited(matches, limit)]
    return [f"{order}  {spec.name}: {' '.join(filter(None, parts))}", *shown]


def notes(plan: ResolvedPlan) -> list[str]:
    """Lines below the table: sizes of captures, modules that were not called, what was not checked, the hash."""
    lines: list[str] = []
    acting_on_calls = [hook.spec.name for hook in plan.hooks if hook.spec.action.acts_on_call]
    for hook in plan.hooks:
        lines += _hook_notes(hook, plan.samples, acting_on_calls)
    is_unknown = plan.unchecked is not None or plan.batch_unknown is not None
    for hook in plan.hooks:
        lines += _batch_notes(hook, is_unknown=is_unknown)
    if plan.no_output is not None:
        lines.append(plan.no_output)
    bundle = plan.bundle
    if bundle is not None:
        names = listed((each.spec.name for each in plan.hooks if each.spec.name in bundle.sites), SHOWN)
        made_for = f"made for the model class {bundle.model}"
        lines.append(f"from the bundle {bundle.path}, {made_for}: {names or 'no hook'}")
    lines += _code_notes(plan)
    if plan.unchecked:
        lines.append(f"shapes unchecked: {plan.unchecked}")
    if plan.batch_as_sequence:
        lines.append(
            f"{listed(plan.batch_as_sequence, SHOWN)}: batch_first is false, and dimension 0 of the input has the "
            "samples: a batch is taken for one sequence"
        )
    if plan.batch_unknown:
        lines.append(f"batch dimensions unknown: {plan.batch_unknown}")
    if not plan.hooks:
        lines.append("no hooks")
    lines.append(f"plan {plan.hash[:12]}")
    return lines


def _code_notes(plan: ResolvedPlan) -> Iterator[str]:
    """A line for each of the user's own functions."""
    codes: dict[str, Code] = {}
    for hook in plan.hooks:
        codes |= {f"{hook.spec.where}.{key}": function.code for key, function in hook.functions.items()}
    for where, code in (codes | dict(plan.code)).items():
        yield f"own Python: {where} {code.name} ({code.sha256[:12]})"


def shown_name(match: Match) -> str:
    """The path of a match with the parameters and other names; ``(root)`` for the root module, whose path is empty."""
    shown = match.path or "(root)"
    if match.matched_parameters:
        shown += f" ({', '.join(match.matched_parameters)})"
    others = [name for name in match.names if name != match.path]
    return f"{shown} (also {', '.join(others)})" if others else shown


def _limited(items: list[str], limit: int | None) -> list[str]:
    if limit is None or len(items) <= limit:
        return items
    return first_lines(items, limit - 1)


def _hook_notes(hook: PlannedHook, samples: int | None, acting_on_calls: Sequence[str]) -> Iterator[str]:
    name = hook.spec.name
    captured = _captured_size(hook, samples)
    if captured:
        yield f"{name}: captures {captured}"
    added = {**hook.new_parameters, **hook.new_buffers}
    if added:
        shown = listed([f"{name} {list(shape)}" for name, shape in added.items()], SHOWN)
        yield f"{name}: adds {shown} to each module, {sum(map(prod, added.values())):,} elements"
    for key, values in hook.values.items():
        if values:
            yield _value_note(hook, key, values)
    noted = defaultdict[str, list[str]](list)
    for match in hook.matches:
        noted[match.note].append(match.path or "(root)")
    for note, paths in noted.items():
        if note:
            yield f"{name}: {note}, on {listed(paths, SHOWN)}"
    finds = hook.spec.action.finds
    if finds and not hook.matches:
        yield f"{name}: no module that {str(hook.spec.keys.select)!r} matches has {finds}"
    elif finds and not hook.is_found:
        yield f"{name}: which modules have {finds} shows at their calls"
    missed = [match.path or "(root)" for match in hook.matches if match.called is False]
    if missed:
        under = f" under {listed(acting_on_calls, SHOWN)}" if acting_on_calls else ""
        yield f"{name}: the example did not reach {listed(missed, SHOWN)}{under}"


def data(plan: ResolvedPlan) -> dict[str, Any]:
    """What the table shows as plain data; `bytes`: of all captures of a run, None if it is not known."""
    total: float | None = 0
    hooks: list[dict[str, Any]] = []
    for hook in plan.hooks:
        spec = hook.spec.to_dict()
        shapes = [match.shape for match in hook.matches]
        captured = [match.bytes for match in hook.matches if match.bytes is not None]
        hooks.append(
            {
                "name": hook.spec.name,
                **{key: spec[key] for key in ("select", "hook", "action", "params")},
                "matches": [match.path for match in hook.matches],
                "shape": shapes[0] if len(set(shapes)) == 1 else shapes,
                "bytes": int(sum(captured)) if captured else None,
            }
        )
        if hook.spec.action.captures:
            is_known = len(captured) == len(shapes) and all(match.per_sample for match in hook.matches)
            is_known = is_known and hook.spec.action.value_of(Meaning.SAMPLES) is None
            known = plan.samples if is_known else None
            total = None if total is None or known is None else total + sum(captured) * known
    size_of_run = None if total is None else int(total)
    return {"model": plan.model, "hash": plan.hash, "hooks": hooks, "bytes": size_of_run}


def _captured_size(hook: PlannedHook, samples: int | None) -> str:
    """How much the hook captures, as text; empty if it captures nothing, or that is not known."""
    storing = [match for match in hook.matches if match.bytes is not None]
    if not storing:
        return ""
    total = sum(match.bytes or 0 for match in storing)
    unit = "sample" if all(match.per_sample for match in storing) else "firing"
    kept = hook.spec.action.value_of(Meaning.SAMPLES)
    if kept is not None:
        return f"{size(total)} per {unit} of the kept ones ({kept})"
    if samples is not None and unit == "sample":
        return f"{size(total)} per sample, {size(total * samples)} per run of {samples} samples"
    return f"{size(total)} per {unit}"


def _batch_notes(hook: PlannedHook, *, is_unknown: bool) -> Iterator[str]:
    """Where the batch is not dimension 0 alone of what the hook sees, of a capture of what it captures; or not known.

    is_unknown: no trial run has shown which dimensions are the batch
    """
    if not hook.spec.hook_type.batch or hook.spec.keys.batch_dim is not None:
        return
    stores_batches = hook.spec.action.captures and not hook.spec.works_by_sample
    places = defaultdict[str, list[str]](list)
    for match in hook.matches:
        path = match.path or "(root)"
        seen = hook.batch_of(match.path)
        shown = hook.captured_of(match.path) if stores_batches else seen
        if stores_batches and not shown.is_known and (is_unknown or seen.is_known):
            places[_UNKNOWN_BATCH].append(path)
        followers = shown.followers or {}
        if len(set(followers.values())) == 1:
            followers = {"": next(iter(followers.values()))}
        for inside, dims in followers.items():
            if dims != (0,):
                places[_batch_text(dims)].append(f"{path} {inside}".rstrip())
    for text, paths in places.items():
        yield f"{hook.spec.name}: {text}, on {listed(paths, SHOWN)}"


_UNKNOWN_BATCH = (
    "captures a row for each firing, as its batch dimension is unknown: if it has one, name it with batch_dim"
)


def _batch_text(followers: Sequence[int]) -> str:
    if not followers:
        return "no batch dimension"
    if len(followers) == 1:
        return f"batch dimension {followers[0]}"
    return f"batch dimension {followers[0]} (dimension {followers[1]} follows the batch too: name another by batch_dim)"


def _value_note(hook: PlannedHook, key: str, values: Mapping[str, Source]) -> str:
    """The shape and size of a value from a file or a run: one for all modules, or one for each module."""
    different = each_once(values.values())
    total = sum(form(value)[1] for value in different)
    total_size = f", {size(total)}" if total else ""
    if total and is_by_sample(hook.spec.action.outside_values()[key]):
        total_size += " per sample"
    where = f"{hook.spec.name}.{key}"
    if len(different) == 1:
        return f"{where}: a value {form(different[0])[0]}{total_size}"
    shown: list[str] = []
    for path, value in values.items():
        shape, count = form(value)
        text = f"{path or '(root)'} {shape}"
        shown.append(f"{text} {size(count)}" if count else text)
    return f"{where}: one for each of {len(values)} modules{total_size}: {listed(shown, SHOWN)}"


def size(count: float) -> str:
    """A readable number of bytes: ``1.5 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
