"""The records of a run directory as typed models with their keys, types and bounds, and reading them.

A run directory may come from anybody. Keys that are not named here are kept as they are, because a later version may
have added them; a key may be missing, because an earlier version did not write it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AliasPath,
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from hookrun.errors import shortened
from hookrun.store.files import StoreError, read_json, read_lines
from hookrun.store.format import FAULTS, METRICS, SAMPLES, STATS, TOKENS
from hookrun.store.objective import Direction, Goal, OfRun

MOST_NAME = 1_000
"""Most characters of the name of a hook, module, parameter or metric."""

MOST_TEXT = 2**20
"""Most characters of any other text."""

MOST_COUNT = 2**53
"""The largest count of rows, bytes, parameters or steps: integers up to this one are exact as floats too."""

Name = Annotated[str, StringConstraints(max_length=MOST_NAME)]
Text = Annotated[str, StringConstraints(max_length=MOST_TEXT)]
Count = Annotated[int, Field(ge=0, le=MOST_COUNT)]
Whole = Annotated[int, Field(ge=-(2**64), le=2**64)]

T = TypeVar("T")
K = TypeVar("K")
Listing = Annotated[list[T], FailFast()]
"""A list of which only the first invalid item is reported: to report each of a million would take very long."""

Sha256 = Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]


class Record(BaseModel):
    """A mapping whose known keys are checked without type conversion."""

    model_config = ConfigDict(
        strict=True, extra="allow", frozen=True, protected_namespaces=(), defer_build=True
    )


class ObjectiveRecord(Record):
    """The result of a run by its objective.

    value: None if the run has no finite value
    epoch: the epoch of the value; None if its line has none
    """

    metric: Name
    direction: Direction
    of: OfRun
    value: Annotated[float, Field(allow_inf_nan=False)] | None
    epoch: Count | None

    @property
    def goal(self) -> Goal:
        """The objective."""
        return Goal(self.metric, self.direction, self.of)


class Status(Record):
    """status.json. `manifest` is the SHA-256 of manifest.json; None unless the run has ended."""

    status: Name
    reason: Text | None = ""
    started: Name | None = None
    ended: Name | None = None
    pid: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    host: Name | None = None
    exit_code: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    manifest: Sha256 | None = None
    objective: ObjectiveRecord | None = None


class JobRecord(Record):
    """job.json: the hash of the job's configuration, by which a resumed sweep knows the job."""

    config: Sha256


class SweepRecord(Record):
    """sweep.json.

    stopped_by: the directory of the job whose failure ended the sweep, as `fail_fast` asks for
    jobs:       the number of jobs, with the baselines; None if a sweeper chooses them during the sweep
    finished:   in another file, once all jobs have ended with exit code 0: the hash of the sweep and its jobs
    """

    fail_fast: bool = False
    stopped_by: Text = ""
    jobs: Count | None = None
    finished: Text = ""


class PlannedMatch(Record):
    """A module or parameter that a hook matched."""

    path: Name
    type: Annotated[Name | None, Field(alias="class")] = None
    names: Listing[Name] = []
    shape: Text | None = None


class PlannedHookRecord(Record):
    """A hook of the plan."""

    name: Name
    hook: Name | None = None
    action: Name | None = None
    params: dict[Name, Any] | None = None
    when: dict[Name, Any] | None = None
    targets: Listing[PlannedMatch] = []

    @property
    def clauses(self) -> dict[str, Any]:
        """Its other keys, such as `tokens` and `heads`."""
        return self.model_extra or {}


class UsedRunRecord(Record):
    """A run from which another run takes values."""

    where: Name
    run: Text
    path: Text
    need: bool = False
    plan: Name | None = None
    manifest: Name | None = None


class PlanRecord(Record):
    """plan.json."""

    hash: Name | None = None
    model: Name | None = None
    seed: Whole | None = None
    unchecked: Text | None = None
    no_output: Text | None = None
    hooks: Listing[PlannedHookRecord] = []
    runs: Listing[UsedRunRecord] = []


class ModuleRecord(Record):
    """A module of the model."""

    path: Name
    names: Listing[Name]
    type: Annotated[Name, Field(alias="class")]
    parameters: Count


class ModelRecord(Record):
    """model.json.

    weights: their source: `random`, the name of published weights, or a path
    trained: whether the run trains the model; None: an earlier version, or a user's own loop, wrote the file
    """

    type: Annotated[Name | None, Field(alias="class")] = None
    weights: Text | None = None
    trained: bool | None = None
    modules: Listing[ModuleRecord] = []


StepCounts = Annotated[tuple[Count, Count, Count], Field(strict=False)]


class SiteRecord(Record):
    """What a hook did at one module.

    by_step: of logged steps of a training: the step, how many elements the hook changed, and of how many
    """

    hook: Name
    module: Name
    fired: Count
    changed: Count
    total: Count
    silent: Text | None = None
    by_step: Listing[StepCounts] = []


class HooksRecord(Record):
    """hooks.json."""

    sites: Listing[SiteRecord] = []


class EnvRecord(Record):
    """env.json."""

    python: Name | None = None
    torch: Name | None = None
    torchvision: Name | None = None
    hydra: Name | None = None
    hookrun: Name | None = None
    platform: Name | None = None
    cpu_count: Count | None = None
    device: Name | None = None
    device_name: Name | None = None
    cublas_workspace: Name | None = None
    threads: Count | None = None
    recorded: bool | None = None
    argv: Listing[Text] = []
    trusted: Listing[Text] = []
    runs: Listing[UsedRunRecord] = []


class StatsLine(Record):
    """A line of stats.jsonl: the keys that mean the same for every action. Each action may add keys of its own."""

    hook: Name
    module: Name | None = None
    path: Name | None = None
    action: Name | None = None
    mode: Name | None = None
    epoch: Count | None = None
    step: Count | None = None
    call: Count | None = None
    ok: bool | None = None
    spent: Count | None = None


class FaultLine(StatsLine):
    """A line of faults.jsonl: a bit that was flipped. It also has the element's value `before` and `after`.

    module:  of the hook; empty for the model itself
    element: the index in the whole flattened tensor, with the rows of all ranks
    draw:    the number of the random draw: the call of the module in this run, and the tensor in that call
    """

    module: Name
    element: Count
    bit: Annotated[int, Field(ge=0, lt=64)]
    draw: Annotated[list[Count], Field(min_length=1, max_length=2)]


Of = Literal["batch", "epoch"]
"""The numbers of a line are means over one logged batch, or over a whole pass through the split."""

OfPart = Literal["position", "sample"]
"""They may also be means over the tokens at one position, or over those of one sample."""

MOST_METRICS = 1_000
"""The maximum number of keys in a line of metrics.jsonl."""


class MetricsLine(Record):
    """A line of metrics.jsonl: the keys common to all lines. The other keys are metrics, all scalars.

    of: None in lines of earlier versions, which did not log the means of training epochs
    """

    __pydantic_extra__: dict[Name, bool | Whole | float | Text | None]

    split: Text | None = None
    of: Of | OfPart | None = None

    @model_validator(mode="before")
    @classmethod
    def _few_keys(cls, line: Any) -> Any:
        if isinstance(line, Mapping) and len(line) > MOST_METRICS:
            raise ValueError(f"it has {len(line):,} keys, and a line has at most {MOST_METRICS:,}")
        return line


class ManifestFile(Record):
    """A file as it was when the run ended."""

    bytes: Count
    sha256: Sha256


class ManifestRecord(Record):
    """manifest.json: path within the run directory -> the file."""

    files: dict[Annotated[str, StringConstraints(min_length=1, max_length=4_096)], ManifestFile]


class ConfigSource(Record):
    """A place from which Hydra read configurations."""

    provider: Name
    path: Text


class HydraRecord(Record):
    """Hydra's own settings, in .hydra/hydra.yaml or multirun.yaml.

    task_overrides, hydra_overrides: the overrides of the command line: of the experiment, and of Hydra itself
    cwd:                             the folder in which the run was started
    config_name:                     the name of the root configuration
    """

    mode: Name | None = None
    overrides: dict[Name, Any] = {}
    runtime: dict[Name, Any] = {}
    job: dict[Name, Any] = {}
    task_overrides: Annotated[Listing[Text], Field(validation_alias=AliasPath("overrides", "task"))] = []
    hydra_overrides: Annotated[Listing[Text], Field(validation_alias=AliasPath("overrides", "hydra"))] = []
    cwd: Annotated[Text, Field(validation_alias=AliasPath("runtime", "cwd"))] = ""
    config_sources: Annotated[
        Listing[ConfigSource], Field(validation_alias=AliasPath("runtime", "config_sources"))
    ] = []
    config_name: Annotated[Name | None, Field(validation_alias=AliasPath("job", "config_name"))] = None


class OfSample(Record):
    """A line about one sample."""

    sample: Count
    split: Name


class SampleLine(OfSample):
    """A line of samples.jsonl: the file, class or tokens of a sample. A path may be as long as the file system allows.

    tokens:  of a sequence, without its padding
    padding: the number of padding tokens before and after `tokens`
    targets: for each token, the token that was to be predicted there
    loss:    the cross-entropy of the sample's class

    A file has many lines: pydantic would make a deep copy of each default that is a list.
    """

    file: Text = ""
    label: Annotated[Text | None, Field(alias="class")] = None
    predicted_class: Text | None = None
    loss: float | None = None
    tokens: Listing[Count] = Field(default_factory=list)
    padding: Annotated[list[Count], Field(min_length=2, max_length=2)] = Field(default_factory=lambda: [0, 0])
    targets: Listing[Count | None] = Field(default_factory=list)


class TokenLine(Record):
    """A line of tokens.jsonl: the text of a token that was captured at or generated."""

    token: Count
    text: Text


TokenScore = Annotated[tuple[Count, Text | None, float], Field(strict=False)]
"""Id, text and probability of a token."""


class PictureLine(OfSample):
    """A line of pictures.jsonl: a small picture of a sample, a PNG in base64."""

    png: Annotated[str, StringConstraints(max_length=2**17, pattern=r"^iVBORw0KGgo[A-Za-z0-9+/]*={0,2}$")]


STREAMS: Mapping[str, type[Record]] = {
    METRICS: MetricsLine,
    STATS: StatsLine,
    FAULTS: FaultLine,
    SAMPLES: SampleLine,
    TOKENS: TokenLine,
}
"""The files of JSON lines that any run may write; `store.studies.streams` has those of the studies too."""

R = TypeVar("R", bound=Record)

_adapter = cache(TypeAdapter)


def checked(value: Any, model: type[T]) -> T:
    """The value as a record or a dataclass. Raises ValueError that says what is wrong first, and where."""
    try:
        record: T = _adapter(model).validate_python(value)  # type: ignore[arg-type]  # a class can be hashed
        return record
    except ValidationError as error:
        raise ValueError(first_problem(error)) from None


def read_record(path: Path, model: type[Record]) -> dict[str, Any]:
    """The content of a JSON file directly in a run directory. StoreError if it does not fit the model."""
    content: dict[str, Any] = read_json(path)
    fitting(path, content, model)
    return content


def typed_record(path: Path, model: type[R]) -> R:
    """The content of a JSON file directly in a run directory, as a record. StoreError if it does not fit the model."""
    return fitting(path, read_json(path), model)


def read_records(path: Path, model: type[Record]) -> list[dict[str, Any]]:
    """The lines of a file directly in a run directory, without an incomplete last line.

    StoreError if a line does not fit the model.
    """
    return list(each_record(path, model))


def each_record(path: Path, model: type[Record]) -> Iterator[dict[str, Any]]:
    """As `read_records`, one line after the other."""
    for number, record in read_lines(path):
        fitting(f"{path}, line {number}", record, model)
        # json gives each line keys of its own, which take as much memory as the values
        yield {sys.intern(key): value for key, value in record.items()}


def fitting(place: Path | str, content: Any, model: type[T]) -> T:
    """The content as a record or a dataclass. StoreError, with the place of the content, if it does not fit."""
    try:
        return checked(content, model)
    except ValueError as error:
        raise StoreError(f"{place}: {error}") from error


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """The items by their key, in the order in which the keys first occur."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def first_problem(error: ValidationError) -> str:
    """Such as ``found a str, expected an integer (entries.0.rows)``; without the value, which may be very long."""
    details = error.errors(include_url=False)
    first = details[0]
    where = ".".join(shortened(str(part), 60) for part in first["loc"])
    kind = type(first["input"]).__name__
    given = "nothing" if kind == "NoneType" else f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"
    match first["type"]:
        case "missing":
            message = f"it has no {where.rpartition('.')[2]}"
        case "model_type" | "dict_type" | "dataclass_type":
            message = f"found {given}, expected a mapping"
        case "value_error":
            message = str(first["ctx"]["error"])
        case kind if kind.endswith("_type"):
            message = f"found {given}: {first['msg'].lower()}"
        case _:
            message = first["msg"][:1].lower() + first["msg"][1:]
    more = f", and {len(details) - 1} more" if len(details) > 1 else ""
    return f"{message} ({where}{more})" if where or more else message
