"""The plan as a table: order, hook, modules, class, hook type, action, parameters, schedule, shapes."""

from __future__ import annotations

import io
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

from torch import Tensor

from hookrun.engine.actions.fields import Meaning
from hookrun.engine.actions.values import is_by_sample
from hookrun.engine.plan.plan import SHOWN, Match, PlannedHook, ResolvedPlan
from hookrun.engine.spec.hook import HookSpec
from hookrun.engine.trust.callables import Code
from hookrun.errors import first_lines, listed, printable
from hookrun.run.experiment.run_values import Source, form

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_ANY = 10_000
"""Width in characters that is enough for any table."""
MOST_TEXT = 48
"""The largest number of characters of a target or an index."""


Column = tuple[str, Mapping[str, str]]
"""An additional column: its heading, and hook name -> text."""


def table(plan: ResolvedPlan, limit: int | None = None, more: Column | None = None) -> Table:
    """The plan as a rich table, with at most `limit` modules of each hook."""
    from rich import box
    from rich.table import Table

    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    names = ["#", "hook", "modules", "class", "hook type", "action", "parameters", "when", "shape"]
    for name in names if more is None else [*names, more[0]]:
        drawn.add_column(name, justify="right" if name == "#" else "left", no_wrap=True)
    for order, hook in enumerate(plan.hooks):
        spec, matches = hook.spec, hook.matches
        drawn.add_row(
            str(order),
            spec.name,
            "\n".join(_limited([shown_name(match) for match in matches], limit)),
            "\n".join(_limited([match.type for match in matches], limit)),
            spec.hook_type.name,
            spec.action.action_name,
            _parameters(spec),
            str(spec.keys.when),
            "\n".join(_limited([match.shape or "-" for match in matches], limit)),
            *([] if more is None else [more[1].get(spec.name, "")]),
        )
    return drawn


def text(plan: ResolvedPlan) -> str:
    """The plan as plain text of any width, with some modules of each hook."""
    from rich.console import Console

    file = io.StringIO()
    console = Console(file=file, width=_ANY, no_color=True, highlight=False, emoji=False, markup=False)
    show(plan, console, SHOWN)
    shown = printable(file.getvalue(), kept="\n")
    return "\n".join(line.rstrip() for line in shown.split("\n")).strip("\n")


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
        narrow, console.width = console.width, max(width, console.width)
        # without the edge above the headings, which is blank
        console.print(SegmentLines(console.render_lines(drawn)[1:], new_lines=True))
        console.width = narrow
    else:
        for order, hook in enumerate(plan.hooks):
            console.print("\n".join(_card(order, hook, limit)), soft_wrap=True)
            if more is not None and (said := more[1].get(hook.spec.name)):
                console.print(f"   {more[0]}: {said}", soft_wrap=True)
    for line in notes(plan):
        console.print(line, soft_wrap=True)


def _card(order: int, hook: PlannedHook, limit: int | None) -> list[str]:
    spec = hook.spec
    parts = [spec.hook_type.name, spec.action.action_name, _parameters(spec), str(spec.keys.when)]
    matches = [f"{shown_name(match)}  {match.type}  {match.shape or '-'}" for match in hook.matches]
    shown = [f"   {line}" for line in _limited(matches, limit)]
    return [f"{order}  {spec.name}: {' '.join(filter(None, parts))}", *shown]


def notes(plan: ResolvedPlan) -> list[str]:
    """Lines below the table: sizes of captures, modules that were not called, what was not checked, the hash."""
    of_calls = [hook.spec.name for hook in plan.hooks if hook.spec.action.of_call]
    is_unknown = plan.unchecked is not None or plan.batch_unknown is not None
    codes: dict[str, Code] = {
        f"{hook.spec.where}.{field}": function.code
        for hook in plan.hooks
        for field, function in hook.functions.items()
    }
    return [
        *(line for hook in plan.hooks for line in _hook_notes(hook, plan.samples, of_calls)),
        *(line for hook in plan.hooks for line in _batch_notes(hook, is_unknown=is_unknown)),
        *([] if plan.no_output is None else [plan.no_output]),
        *(
            f"own Python: {where} {code.name} ({code.sha256[:12]})"
            for where, code in {**codes, **plan.code}.items()
        ),
        *([f"shapes unchecked: {plan.unchecked}"] if plan.unchecked else []),
        *(
            [
                f"{listed(plan.batch_as_sequence, SHOWN)}: batch_first is false, and dimension 0 of the input has the "
                "samples: a batch is taken for one sequence"
            ]
            if plan.batch_as_sequence
            else []
        ),
        *([f"batch dimensions unknown: {plan.batch_unknown}"] if plan.batch_unknown else []),
        *([] if plan.hooks else ["no hooks"]),
        f"plan {plan.hash[:12]}",
    ]


def shown_name(match: Match) -> str:
    """The path of a match with the parameters and other names; ``(root)`` for the root module, whose path is empty."""
    others = [name for name in match.names if name != match.path]
    own = f" ({', '.join(match.own)})" if match.own else ""
    return (match.path or "(root)") + own + (f" (also {', '.join(others)})" if others else "")


def _parameters(spec: HookSpec) -> str:
    given = {key: str(getattr(spec.keys, key) or "") for key in ("target", "tokens", "heads", "index")}
    given["batch_dim"] = "" if spec.keys.batch_dim is None else str(spec.keys.batch_dim)
    parts = [
        *(
            f"{key}={text if len(text) <= MOST_TEXT else text[: MOST_TEXT - 1] + '…'}"
            for key, text in given.items()
            if text
        ),
        *(f"{field}={argument(value)}" for field, value in spec.action.said(spec.hook_type).items()),
    ]
    return " ".join(parts)


def argument(value: object) -> str:
    """A parameter of an action as the plan shows it: ``0.01``, ``[1, 2]``, ``tensor[3]``."""
    match value:
        case float():
            return f"{value:g}"
        case tuple() | list():
            text = "[" + ", ".join(map(argument, value)) + "]"
            return text if len(text) <= 32 else text[:29] + "..."
        case dict():
            text = "{" + ", ".join(f"{key}: {argument(item)}" for key, item in value.items()) + "}"
            return text if len(text) <= 60 else text[:57] + "..."
        case Tensor():
            return f"tensor{list(value.shape)}"
    return str(value)


def _limited(items: Sequence[str], limit: int | None) -> list[str]:
    return list(items) if limit is None or len(items) <= limit else first_lines(items, limit - 1)


def _hook_notes(hook: PlannedHook, samples: int | None, of_calls: Sequence[str]) -> Iterator[str]:
    sizes = [match for match in hook.matches if match.bytes is not None]
    if sizes:
        each = sum(match.bytes or 0 for match in sizes)
        unit = "sample" if all(match.per_sample for match in sizes) else "firing"
        line = f"{hook.spec.name}: captures {size(each)} per {unit}"
        if (kept := hook.spec.action.value_of(Meaning.SAMPLES)) is not None:
            line += f" of the kept ones ({kept})"
        elif samples is not None and unit == "sample":
            line += f", {size(each * samples)} per run of {samples} samples"
        yield line
    if own := {**hook.own, **hook.buffers}:
        added = listed([f"{name} {list(shape)}" for name, shape in own.items()], SHOWN)
        yield f"{hook.spec.name}: adds {added} to each module, {sum(map(prod, own.values())):,} elements"
    yield from (_value_note(hook, field, values) for field, values in hook.values.items() if values)
    missed = [match.path or "(root)" for match in hook.matches if match.called is False]
    if missed:
        under = f" under {listed(of_calls, SHOWN)}" if of_calls else ""
        yield f"{hook.spec.name}: the example did not reach {listed(missed, SHOWN)}{under}"


def _batch_notes(hook: PlannedHook, *, is_unknown: bool) -> Iterator[str]:
    """Where the batch is not dimension 0 alone of what the hook sees, of a capture of what it captures; or not known.

    is_unknown: no trial run has shown which dimensions are the batch
    """
    if not hook.spec.hook_type.batch or hook.spec.keys.batch_dim is not None:
        return
    stores_batches = hook.spec.action.captures and not hook.spec.works_by_sample
    places = defaultdict[str, list[str]](list)
    for match in hook.matches:
        path, seen = match.path or "(root)", hook.batch_of(match.path)
        shown = hook.captured_of(match.path) if stores_batches else seen
        if stores_batches and not shown.is_known and (is_unknown or seen.is_known):
            places[_UNKNOWN_BATCH].append(path)
        followers = shown.followers or {}
        are_alike = len(set(followers.values())) == 1
        for inside, dims in followers.items():
            if dims != (0,):
                places[_batch_text(dims)].append(path if are_alike else f"{path} {inside}")
            if are_alike:
                break
    for said, paths in places.items():
        yield f"{hook.spec.name}: {said}, on {listed(paths, SHOWN)}"


_UNKNOWN_BATCH = (
    "captures a row for each firing, as its batch dimension is unknown: if it has one, name it with batch_dim"
)


def _batch_text(followers: Sequence[int]) -> str:
    if not followers:
        return "no batch dimension"
    if len(followers) == 1:
        return f"batch dimension {followers[0]}"
    return f"batch dimension {followers[0]} (dimension {followers[1]} follows the batch too: name another by batch_dim)"


def _value_note(hook: PlannedHook, field: str, values: Mapping[str, Source]) -> str:
    """The shape and size of a value from a file or a run: one for all modules, or one for each module."""
    different = {id(value): value for value in values.values()}.values()
    unit = " per sample" if is_by_sample(hook.spec.action.outside_values()[field]) else ""
    forms = [form(value) for value in different]
    if len(forms) == 1:
        shape, count = forms[0]
        return f"{hook.spec.name}.{field}: a value {shape}" + (f", {size(count)}{unit}" if count else "")
    each = [
        " ".join([path or "(root)", shape, *([size(count)] if count else [])])
        for path, (shape, count) in ((path, form(value)) for path, value in values.items())
    ]
    total = sum(count for _, count in forms)
    of_all = f", {size(total)}{unit}" if total else ""
    return f"{hook.spec.name}.{field}: one for each of {len(values)} modules{of_all}: {listed(each, SHOWN)}"


def size(count: float) -> str:
    """A readable number of bytes: ``1.5 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
