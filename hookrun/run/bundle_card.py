"""The card of a bundle: a page of Markdown that says what its hooks do, what they fit, and how they are applied."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from hookrun.errors import listed, printable, shortened
from hookrun.store.config.stored import read_yaml
from hookrun.store.format import OVERRIDES
from hookrun.store.reader import Run
from hookrun.store.scores import last_metrics
from hookrun.version import __version__

_MOST_CELL = 200
_MOST_SITES = 4
_MOST_METRICS = 30


def card(
    run: Run,
    left_out: Mapping[str, str],
    hooks: str,
    record: Mapping[str, Any],
    learned: str,
    picture: str,
) -> str:
    """The page.

    left_out: hook of the run -> why it is not in the bundle
    hooks:    the text of hooks.yaml
    record:   the content of model.json
    learned:  the checkpoint that learned parameters are from; ``""``: there are none
    picture:  the file of the run's picture; ``""``: there is none
    """
    return "\n".join(_lines(run, left_out, hooks, record, learned, picture)) + "\n"


def _lines(
    run: Run,
    left_out: Mapping[str, str],
    hooks: str,
    record: Mapping[str, Any],
    learned: str,
    picture: str,
) -> Iterator[str]:
    model = escaped(record["class"])
    yield "# Hooks for " + model
    yield ""
    note = run.config.get("note")
    if note:
        yield from (escaped(note), "")
    yield "## What they do"
    yield ""
    yield from _table(("hook", "where", "when it fires", "action", "parameters"), _doing(run, record))
    if learned:
        yield from (
            "",
            f"Parameters that they add have the values of the checkpoint {escaped(learned)}, and can be trained on.",
        )
    for name, why in left_out.items():
        yield from ("", f"Left out: {escaped(name)}, because {escaped(why)}.")
    yield from ("", "## What they fit", "")
    yield f"They were made for the model class {model}. A model fits if it has the modules below, with values of such shapes."
    yield ""
    yield from _table(("hook", "module", "class", "shape"), _sites(record))
    yield from ("", "## How they are applied", "", "In an experiment:")
    yield from _fenced("hooks_from: FOLDER", "yaml")
    yield "In Python:"
    python = "import hookrun\n\nwith hookrun.hooked(model, hookrun.load_bundle('FOLDER')):\n    output = model(inputs)"
    yield from _fenced(python, "python")
    yield "FOLDER is the folder of this page. Nothing in it runs code: "
    yield "`hooks.yaml` is data, and `tensors.safetensors` holds tensors, each with its hash in `model.json`."
    yield from ("", "## Where they are from", "")
    typed = read_yaml(run.path / OVERRIDES, run.path)
    words = [str(word) for word in typed] if isinstance(typed, list) else []
    yield from _fenced(f"python -m hookrun {shlex.join(words)}".rstrip(), "sh")
    yield f"hookrun {__version__}, torch {escaped(run.env.get('torch') or 'of an unknown version')}, seed {record['seed']}"
    metrics = list(last_metrics(run.metrics).items())[:_MOST_METRICS]
    if metrics:
        yield ""
        yield from _table(("metric", "with these hooks"), [(name, f"{value:.6g}") for name, value in metrics])
    if picture:
        yield from ("", f"![The curve of the run]({picture})")
    yield from ("", "## hooks.yaml")
    yield from _fenced(hooks, "yaml")


def _doing(run: Run, record: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    for hook in run.plan["hooks"]:
        if hook["name"] not in record["hooks"]:
            continue
        paths = [target["path"] or "(root)" for target in hook["targets"]]
        params = [
            f"{key}={_plain(value)}" for key, value in (hook.get("params") or {}).items() if value is not None
        ]
        when = [
            f"{key}={_plain(value)}"
            for key, value in (hook.get("when") or {}).items()
            if value not in (None, "any", 1.0)
        ]
        fires = " ".join([str(hook["hook"]), *(text for text in when if not text.startswith("seed="))])
        yield hook["name"], listed(paths, _MOST_SITES), fires, str(hook["action"]), ", ".join(params)


def _plain(value: Any) -> str:
    """A parameter; of a value of a run or a file its kind, since the bundle has a copy."""
    if isinstance(value, dict):
        for kind in ("run", "file"):
            if kind in value:
                factor = value.get("factor", 1.0)
                return f"tensors.safetensors times {factor}" if factor != 1.0 else "tensors.safetensors"
    return str(value)


def _sites(record: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    for name, sites in record["hooks"].items():
        for site in sites:
            yield name, site["path"] or "(root)", site["class"], site["shape"] or "not known"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    for row in rows:
        yield f"| {' | '.join(escaped(shortened(cell, _MOST_CELL)) for cell in row)} |"


def _fenced(text: str, language: str) -> Iterator[str]:
    """A block of code, whose fence is longer than any in it."""
    longest = max((len(ticks) for ticks in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    yield from ("", fence + language, printable(text, kept="\n").rstrip("\n"), fence, "")


def escaped(text: object) -> str:
    """The text in one line, in which nothing is Markdown or HTML."""
    return re.sub(r"([!#$&*+.:<>@\\\[\]^_`{|}~-])", r"\\\1", printable(str(text)))
