"""The form of the object that `--json` prints, of which ``python -m hookrun.schema --output`` prints the schema."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

Number = float | Literal["NaN", "Infinity", "-Infinity"]
"""JSON has no NaN and no infinities: they are these words."""


class Form(BaseModel, extra="forbid", use_attribute_docstrings=True):
    """An object with these keys and no others; those with a default are left out where they do not apply."""

    more: int = 0
    """How many entries were left out, here or in a mapping inside: of the list or mapping that lost most."""


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


class Plan(Form):
    """Which action runs where, in firing order."""

    model: str
    hash: str
    hooks: list[PlannedHook]
    bytes: int | None
    """What the captures of the whole run take; null if not known."""


class Module(Form):
    """A module of the model; `names` are all of its names, if it has several."""

    path: str
    type: str
    parameters: int
    shape: str | None
    names: list[str] = []


class Captured(Form):
    """The captured rows of a hook at a module."""

    shape: list[int]
    dtype: str


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


class VerifiedRun(Form):
    """What `hookrun.verify` found in a run: `bad` has a line for each changed, missing or added file."""

    run: str
    files: int
    shards: int
    bytes: int
    bad: list[str]
    notes: list[str]
    status: str


class Answer(Form, extra="allow"):
    """What the page shows first; `what` says what it is, and with it which other keys there are."""

    what: str


class Result(Form):
    """What a command did, or a job of a sweep."""

    plan: Plan | None = None
    modules: list[Module] = []
    selected: list[str] = []
    """The modules or parameters that `task.select` matches."""
    run: str = ""
    """The directory of the run."""
    status: str = ""
    reason: str = ""
    metrics: dict[str, Number] = {}
    """Split and name -> the last value, of a whole pass if there is one."""


class Job(Result):
    """A job of a sweep. `job` is its number, and the name of its directory; of one that is only shown, its plan."""

    job: str
    overrides: list[str]
    exit: int | None = None
    objective: Number | None = None
    notes: list[str] = []


class Output(Result):
    """What a command of hookrun did."""

    version: Literal[1]
    ok: bool
    """Whether the exit code is 0."""
    exit: int
    """0: done. 1: the run failed. 2: refused. 3: a check failed, or runs differ. 128 + n: signal n ended it."""
    notes: list[str]
    mistakes: list[Mistake] = []
    """Why it is not ok."""
    answer: Answer | None = None
    fired: dict[str, dict[str, int]] = {}
    """Hook -> module or parameter -> how often it fired."""
    captures: dict[str, dict[str, Captured]] = {}
    """Hook -> module, with the place in its value if that is a container."""
    folds: str = ""
    """The file of what hooks have accumulated; `run.folds` reads it."""
    warnings: list[str] = []
    """Which hooks did nothing, and where."""
    sweep: str = ""
    """The directory of the sweep."""
    jobs: list[Job] = []
    runs: list[dict[str, Any]] = []
    """The runs of a folder, each with the columns of `hookrun.runs(folder).table()`, and `metrics`."""
    verified: list[VerifiedRun] = []
    text: str = ""
    """What was printed, if that is all that the command does: help, a configuration, the paths of pages."""


def output_schema() -> dict[str, Any]:
    """The JSON Schema of the object."""
    schema = Output.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "hookrun --json"}
