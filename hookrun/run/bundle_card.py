"""The card of a bundle: a page of Markdown that says what its hooks do, what they fit, and how they are applied."""

from __future__ import annotations

import re
from collections.abc import Mapping

from hookrun.errors import printable
from hookrun.store.bundles import PICTURE
from hookrun.store.reader import Run
from hookrun.store.scores import last_metrics
from hookrun.version import __version__

_CARD = """\
# Hooks for {model}

{note}

## What they do

{plan}

They fit a model that has these modules, with values of such shapes. Parameters that they add have their learned values.

{left_out}

## How they are applied

In an experiment, with the folder of this page:

```yaml
hooks_from: FOLDER
```

In Python:

```python
with hookrun.hooked(model, hookrun.load_bundle("FOLDER")):
    output = model(inputs)
```

Nothing in it runs code: `hooks.yaml` is data, and `model.json` has the hash of each tensor.

## Where they come from

{command}

hookrun {version}, torch {torch}. With these hooks the run had:

{metrics}

{picture}
"""


def card_text(run: Run, plan: str, left_out: Mapping[str, str], command: str, *, has_picture: bool) -> str:
    """The page.

    plan:     of the hooks in the bundle, as text
    left_out: hook of the run -> why it is not in the bundle
    command:  that made the run
    """
    rows = ["| metric | value |", "|---|---|"]
    rows += [f"| {escaped(name)} | {value:.6g} |" for name, value in last_metrics(run.metrics).items()]
    missing = [f"Left out: {escaped(name)}, because {escaped(why)}." for name, why in left_out.items()]
    return _CARD.format(
        model=escaped(run.plan.get("model")),
        note=escaped(run.config.get("note") or ""),
        plan=_block(plan),
        left_out="\n".join(missing),
        command=_block(command),
        version=__version__,
        torch=escaped(run.env.get("torch")),
        metrics="\n".join(rows),
        picture=f"![Curves of the run]({PICTURE})" if has_picture else "",
    )


def _block(text: str) -> str:
    """A block of code, whose fence is longer than any in it."""
    fence = "`" * (3 + text.count("`"))
    shown = printable(text, kept="\n")
    return f"{fence}text\n{shown}\n{fence}"


def escaped(text: object) -> str:
    """The text in one line, in which nothing is Markdown or HTML."""
    return re.sub(r"([!#$&*+.:<>@\\\[\]^_`{|}~-])", r"\\\1", printable(str(text)))
