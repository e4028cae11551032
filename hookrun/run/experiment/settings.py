"""The experiment: every root key but `hooks`, as frozen pydantic models that import no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)

from hookrun.data.settings import Data
from hookrun.engine.spec.parameters import AnyChoice
from hookrun.engine.spec.selector import AnySelector
from hookrun.engine.validation import Section
from hookrun.engine.values.index import AnyTarget
from hookrun.errors import shown
from hookrun.models.settings import Model, RunWeights
from hookrun.store.objective import Objective

MOST_NEEDS = 16
MOST_OVERRIDES = 100
MOST_TEXT = 4_000
"""The largest number of characters of one override."""
PREVIOUS = "previous"


def _need_name(text: str) -> str:
    if not re.fullmatch(r"[^\W\d][\w-]{0,99}", text) or text == PREVIOUS:
        taken = f" ({PREVIOUS} is the run before)" if text == PREVIOUS else ""
        raise ValueError(
            f"found the name {shown(text)}{taken}, expected a letter, then letters, digits, _ or -"
        )
    return text


def _experiment_name(text: str) -> str:
    if not re.fullmatch(r"[\w-]+(/[\w-]+)*", text):
        raise ValueError(f"found {shown(text)}, expected the name of an experiment, without `.yaml`")
    return text


class Need(Section):
    """An experiment that is run first, or whose finished run is reused.

    experiment: its name in the config folders
    overrides:  overrides of its configuration, as typed on a command line
    """

    experiment: Annotated[str, AfterValidator(_experiment_name)]
    overrides: Annotated[
        tuple[Annotated[str, Field(max_length=MOST_TEXT)], ...], Field(max_length=MOST_OVERRIDES)
    ] = ()

    def __str__(self) -> str:
        return " ".join(["experiment", self.experiment, *self.overrides])


Needs = Annotated[dict[Annotated[str, AfterValidator(_need_name)], Need], Field(max_length=MOST_NEEDS)]
"""Name -> experiment; ``{run: NAME}`` in a value refers to its run."""


MOST = 10**12
"""The largest number of steps, epochs or batches: more than any run has, and below 64 bits."""
Count = Field(default=None, ge=1, le=MOST)


class TaskKeys(Section):
    """The keys of the section `task` beside `name`. Each subclass is one task, and its fields are the task's own keys.

    task_name:  the word after `task=`
    is_default: it is the task of an experiment that names none; not inherited
    refuses:    key of another task -> why it contradicts this task; other keys of other tasks are ignored
    stopped:    what a run is called that this task has ended early, with a reason
    """

    task_name: ClassVar[str]
    is_default: ClassVar[bool] = False
    refuses: ClassVar[Mapping[str, str]] = {}
    stopped: ClassVar[str] = "stopped by a check"

    @property
    def name(self) -> str:
        """The name of the task."""
        return self.task_name

    def completed(self, hooks: Any) -> Any:
        """The section `hooks`, with the keys that the task itself gives to a hook."""
        return hooks


class WithArguments(Section):
    """A section whose further keys are arguments of a class or function."""

    model_config = ConfigDict(extra="allow")

    @property
    def args(self) -> dict[str, Any]:
        """The arguments by name."""
        return dict(self.model_extra or {})


class Named(WithArguments):
    """A class or function by name; the other keys are its arguments."""

    name: str


class Group(WithArguments):
    """A parameter group of the optimizer; the keys beside `select` are arguments that differ for it."""

    select: AnyChoice


class Optimizer(Named):
    """An optimizer; parameters that are not in one of its `groups` use the optimizer's own arguments."""

    groups: tuple[Group, ...] = Field(default=(), max_length=100)


class Schedule(Named):
    """A learning-rate schedule of torch.optim.lr_scheduler; `schedulers` are its parts, if it is composed."""

    schedulers: tuple[Schedule, ...] | None = Field(default=None, max_length=100)


class Scheduler(Schedule):
    """The learning-rate schedule of a run, stepped once per `interval`."""

    interval: Literal["step", "epoch"] = "epoch"


def _loss(raw: Any) -> Any:
    """Turn the short form, a name, into a loss without arguments."""
    if isinstance(raw, str):
        return {"name": raw}
    if raw is not None and not isinstance(raw, Mapping | Named):
        example = "cross_entropy, mypkg.losses:mine or {name: cross_entropy, label_smoothing: 0.1}"
        raise ValueError(f"found {raw!r}, expected a loss: {example}")
    return raw


_LOSS = {
    "anyOf": [{"type": ["string", "null"]}, {"type": "object", "properties": {"name": {"type": "string"}}}]
}
Loss = Annotated[Named | None, BeforeValidator(_loss), WithJsonSchema(_LOSS)]
"""A loss by name, or a mapping of `name` and the loss's arguments; None: not given."""


class Ema(Section):
    """An exponential moving average of the weights: decay * average + (1 - decay) * weights after each step."""

    decay: float = Field(default=0.999, ge=0, lt=1, allow_inf_nan=False)


class Every(Section):
    """How often a resumable state is saved, whichever is due first; all null: only when a signal arrives."""

    epochs: int | None = Count
    steps: int | None = Count
    minutes: float | None = Field(default=None, gt=0, le=10**6, allow_inf_nan=False)


class Checkpoint(Section):
    """Which weights a run keeps, and how often it saves a state that it can be resumed from.

    save:      `null` means `best` for a job of a sweep and `both` for other runs
    every:     how often a resumable state is saved
    keep:      how many of these states are kept during the run
    keep_done: keep them also when the run is done
    """

    save: Literal["both", "best", "last", "none"] | None = None
    every: Annotated[Every, BeforeValidator(lambda raw: {} if raw is None else raw)] = Every.model_construct(
        epochs=1
    )
    keep: int = Field(default=2, ge=2, le=10**6)
    keep_done: bool = False

    def keeps(self, which: Literal["best", "last"]) -> bool:
        """Whether the run writes this checkpoint."""
        return self.save in (None, "both", which)


Bound = Field(default=None, gt=0, allow_inf_nan=False)


class Train(Section):
    """The training loop. `steps` (optimizer steps) ends it before `epochs` would; `limit_batches` bounds each pass.

    loss:         None: cross_entropy if the targets are integers; other targets need one where it is computed
    output:       the tensor of the model's output that loss and metrics read; None: the first that fits
    parameters:   the parameters to train; None: all that require a gradient
    on_nonfinite: what to do if a loss, or a gradient that the optimizer is about to use, is not finite: `error` fails,
                  `skip` skips the step, `stop` saves and ends the run
    """

    epochs: int = Field(default=10, ge=0, le=MOST)
    steps: int | None = Count
    limit_batches: int | None = Count
    loss: Loss = None
    output: AnyTarget | None = None
    optimizer: Optimizer = Optimizer.model_construct(name="AdamW", lr=0.001)
    scheduler: Scheduler | None = None
    parameters: AnyChoice | None = None
    clip_grad_norm: float | None = Bound
    clip_grad_value: float | None = Bound
    ema: Ema | None = None
    checkpoint: Checkpoint = Checkpoint.model_construct()
    accumulate: int = Field(default=1, ge=1, le=MOST)
    log_every: int = Field(default=10, ge=1, le=MOST)
    shuffle: bool = True
    on_nonfinite: Literal["error", "skip", "stop"] = "error"

    @model_validator(mode="after")
    def _clips_once(self) -> Train:
        if self.clip_grad_norm is not None and self.clip_grad_value is not None:
            raise ValueError("`clip_grad_norm` and `clip_grad_value` are two ways to clip: set one of them")
        return self


class Fsdp(Section):
    """How `strategy: fsdp` shards the model (torch.distributed.fsdp.fully_shard).

    wrap:                  selects the modules that are gathered one at a time, such as the blocks of a transformer; all
                           other parameters are one more unit; null: the whole model is one unit
    mixed_precision:       the dtype of parameters and activations in computations; gradients are reduced in fp32
    reshard_after_forward: parameters are sharded again after the forward pass and gathered again for the backward
                           pass; null: torch's default
    """

    wrap: AnySelector | None = None
    mixed_precision: Literal["bf16", "fp16"] | None = None
    reshard_after_forward: bool | None = None


class Compute(Section):
    """Device, precision and distribution of the computation.

    `precision` other than fp32 is automatic mixed precision; `compile` is torch.compile; `capture_buffer` is the memory
    in MiB for captured rows that wait to be written to disk, pinned for those of an accelerator; if a slow disk fills
    it, the model waits.

    strategy: how a run is split over the processes of torchrun: `ddp` has the whole model in each process, `fsdp`
              shards parameters, gradients and the optimizer's state
    timeout:  seconds without an answer after which a process counts as failed
    """

    device: str = "auto"
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    threads: int | None = Field(default=None, ge=1, le=1024)
    deterministic: bool = True
    compile: bool = False
    capture_buffer: int = Field(default=192, strict=True, ge=1, le=2**20)
    strategy: Literal["none", "ddp", "fsdp"] = "none"
    fsdp: Fsdp = Fsdp.model_construct()
    timeout: float = Field(default=600, ge=1, le=7 * 24 * 3600, allow_inf_nan=False)


Tag = Annotated[str, Field(min_length=1, max_length=100)]
"""A word of the user's own to find a run by."""


class Settings(Section):
    """Every root key of an experiment but `hooks`.

    vars:  the user's own keys, used only by interpolations in other places: `${vars.strength}`
    needs: experiments that are run before this one
    hooked: whether the hooks are installed; if false they are only checked and stored
    baseline: a sweep also runs its jobs with `hooked: false`, and its page compares the other jobs with these
    tags:  words that reports and sweeps show; they have no other effect
    note:  one sentence about the run, likewise
    hooks_from: the folder of a bundle, whose hooks come before those of the experiment
    """

    task: TaskKeys
    model: Model
    data: Data
    train: Train = Train.model_construct()
    compute: Compute = Compute.model_construct()
    hooked: bool = Field(default=True, strict=True)
    seed: int = Field(default=0, ge=0, lt=2**63)
    strict: bool = False
    objective: Objective = Objective.model_construct()
    baseline: bool = Field(default=False, strict=True)
    vars: dict[str, Any] = {}
    needs: Needs = {}
    tags: Annotated[tuple[Tag, ...], Field(max_length=100)] = ()
    note: str = Field(default="", max_length=500)
    hooks_from: Annotated[str, Field(min_length=1)] | None = None


def runs_of(settings: Settings) -> Mapping[str, str]:
    """Key path -> name of each run that `model.weights` and the task name."""
    runs: dict[str, str] = {}
    if isinstance(settings.model.weights, RunWeights):
        runs["model.weights.run"] = settings.model.weights.run
    for place, metric in enumerate(getattr(settings.task, "metrics", None) or ()):
        if metric.against is not None:
            runs[f"task.metrics.{place}.against.run"] = metric.against.run
    if (against := getattr(settings.task, "against", None)) is not None:
        runs["task.against.run"] = against.run
    return runs | getattr(settings.task, "named_runs", {})
