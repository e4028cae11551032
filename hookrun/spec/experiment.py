"""The experiment: every root key but `hooks`, as frozen pydantic models that import no torch."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MOST = 10**12
"""The greatest number of steps, epochs or batches: more than any run does, and less than 64 bits hold."""
MOST_THREADS = 1024
MOST_WORKERS = 256
MOST_SAMPLES = 2**20
"""Samples of one batch."""
MOST_BUFFER = 2**20
"""MiB of the capture buffer: one TiB."""

Count = Field(default=None, ge=1, le=MOST)


class Section(BaseModel):
    """A frozen section of the configuration; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class TaskKeys(Section):
    """The keys of the section `task` beside `name`. Each subclass is one task, and its fields are its own keys.

    task_name:  the word after `task=`
    is_default: it is the task of an experiment that names none; not inherited
    """

    task_name: ClassVar[str]
    is_default: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """The name of the task."""
        return self.task_name


class Model(Section):
    """Which network: a name of the closed registry, its arguments, and where its weights come from."""

    name: str
    args: dict[str, Any] = {}
    weights: str | None = None
    factory: str | None = None

    @model_validator(mode="after")
    def _factory_goes_with_python(self) -> Model:
        if (self.name == "python") != (self.factory is not None):
            raise ValueError("`factory: package.module:function` goes with `name: python`, and only with it")
        return self


class Data(Section):
    """Which data: a name of the closed registry, where it lies, how it is transformed and batched.

    transforms:       name -> arguments, applied in order
    train_transforms: used instead of `transforms` on the train split; null: the same
    """

    name: str
    root: str | None = None
    args: dict[str, Any] = {}
    transforms: dict[str, dict[str, Any] | None] = {}
    train_transforms: dict[str, dict[str, Any] | None] | None = None
    batch_size: int = Field(default=64, ge=1, le=MOST_SAMPLES)
    workers: int = Field(default=0, ge=0, le=MOST_WORKERS)


class Named(Section):
    """A class of torch by name; the other keys are its own arguments."""

    model_config = ConfigDict(frozen=True, extra="allow")
    name: str

    @property
    def args(self) -> dict[str, Any]:
        """The keyword arguments of the class."""
        return dict(self.model_extra or {})


class Scheduler(Named):
    """A learning-rate schedule of torch.optim.lr_scheduler, stepped once per `interval`."""

    interval: Literal["step", "epoch"] = "epoch"


class Train(Section):
    """The training loop. `steps` (optimizer steps) ends it before `epochs` would; `limit_batches` bounds each pass."""

    epochs: int = Field(default=1, ge=0, le=MOST)
    steps: int | None = Count
    limit_batches: int | None = Count
    loss: str = "cross_entropy"
    optimizer: Named = Named(name="AdamW")
    scheduler: Scheduler | None = None
    accumulate: int = Field(default=1, ge=1, le=MOST)
    log_every: int = Field(default=10, ge=1, le=MOST)
    shuffle: bool = True


class Compute(Section):
    """Where and how it computes.

    `precision` other than fp32 is automatic mixed precision; `compile` is torch's; `capture_buffer` is MiB of memory
    for captured rows on their way to the disk, which a slow disk makes the model wait for.
    """

    device: str = "auto"
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    threads: int | None = Field(default=None, ge=1, le=MOST_THREADS)
    deterministic: bool = True
    compile: bool = False
    capture_buffer: int = Field(default=192, strict=True, ge=1, le=MOST_BUFFER)


MOST_TAGS = 100
Tag = Annotated[str, Field(min_length=1, max_length=100)]
"""A word of one's own to find a run by."""


class Settings(Section):
    """Every root key of an experiment but `hooks`. `tags` change nothing: reports and sweeps show them."""

    task: TaskKeys
    model: Model
    data: Data
    train: Train = Train()
    compute: Compute = Compute()
    seed: int = Field(default=0, ge=0, lt=2**63)
    strict: bool = False
    tags: Annotated[tuple[Tag, ...], Field(max_length=MOST_TAGS)] = ()
