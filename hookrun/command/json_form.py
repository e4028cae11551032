"""The form of the object that `--json` prints, of which ``python -m hookrun.schema --output`` prints the schema.

Keys with a default are left out where they do not apply.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

Number = float | Literal["NaN", "Infinity", "-Infinity"]
"""JSON has no NaN and no infinities: they are these words."""


class Form(BaseModel, extra="forbid", use_attribute_docstrings=True):
    """An object with these keys and no others."""


class PlannedHook(Form):
    """A hook of a plan."""

    name: str
    select: str
    hook: str
    action: str
    params: dict[str, Any]
    matches: list[str]
    """Modules or parameters; the root module is an empty text."""
    shape: str | list[str | None] | None
    """Of what the hook sees: one if all matches have the same, else one for each; null if not known."""
    bytes: int | None
    """What one sample, or one firing, captures; null if nothing, or if not known."""
    more: int = 0


class Plan(Form):
    """Which action runs where, in firing order."""

    model: str
    hash: str
    hooks: list[PlannedHook]
    bytes: int | None
    """What the captures of the whole run take; null if not known."""
    more: int = 0


class Module(Form):
    """A module of the model; `names` are all of its names, if it has several."""

    path: str
    type: str
    parameters: int
    shape: str | None
    names: list[str] = []
    more: int = 0


class Captured(Form):
    """The captured rows of a hook at a module; of rows that differ in shape the shape is null."""

    shape: list[int] | None
    dtype: str


class Job(Form):
    """A job of a sweep: with its run, or with what it shows, such as its plan."""

    job: str
    """Its number, which is the name of its directory."""
    overrides: list[str]
    run: str = ""
    status: str = ""
    reason: str = ""
    exit: int | None = None
    objective: Number | None = None
    metrics: dict[str, Number] = {}
    plan: Plan | None = None
    modules: list[Module] = []
    selected: list[str] = []
    notes: list[str] = []
    more: int = 0


class Fix(Form):
    """Take away what stands at `where` of the mistake, then set `key` to `value`; without it, take `key` away."""

    key: str
    value: Any = None


class Mistake(Form):
    """What is wrong: the key path or words, a sentence, what was found, the nearest names, and what corrects it."""

    where: str | None
    what: str
    found: Any
    near: list[str]
    fix: Fix | None
    more: int = 0


class VerifiedRun(Form):
    """What `hookrun.verify` found in a run: `bad` has a line for each changed, missing or added file."""

    run: str
    files: int
    shards: int
    bytes: int
    bad: list[str]
    notes: list[str]
    status: str
    more: int = 0


class Answer(Form, extra="allow"):
    """What the page shows first; `what` says what it is, and with it which other keys there are."""

    what: str


class Output(Form):
    """What a command of hookrun did."""

    version: Literal[1]
    ok: bool
    """Whether the exit code is 0."""
    exit: int
    """0: done. 1: the run failed. 2: refused. 3: a check failed or stopped it. 128 + n: signal n ended it."""
    notes: list[str]
    mistakes: list[Mistake] = []
    """Why it is not ok."""
    answer: Answer | None = None
    plan: Plan | None = None
    modules: list[Module] = []
    selected: list[str] = []
    """The modules or parameters that `task.select` matches."""
    run: str = ""
    status: str = ""
    reason: str = ""
    metrics: dict[str, Number] = {}
    """Split and name -> the last value, of a whole pass if there is one."""
    fired: dict[str, dict[str, int]] = {}
    """Hook -> module or parameter -> how often it fired."""
    captures: dict[str, dict[str, Captured]] = {}
    warnings: list[str] = []
    """Which hooks did nothing, and where."""
    sweep: str = ""
    jobs: list[Job] = []
    runs: list[dict[str, Any]] = []
    """The runs of a folder, each with the columns of `hookrun.runs(folder).table()`, and `metrics`."""
    verified: list[VerifiedRun] = []
    text: str = ""
    """What was printed, if that is all that the command does: help, a configuration, the paths of pages."""
    more: int = 0
    """How many entries were left out here of the list or mapping that lost most; also in the objects inside."""


def output_schema() -> dict[str, Any]:
    """The JSON Schema of the object."""
    schema = Output.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "hookrun --json"}
