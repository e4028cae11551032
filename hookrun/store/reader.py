"""`open_run`: a run directory as one lazy object."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, StackDataset

from hookrun.data.info import SPLITS, DataInfo, Split
from hookrun.data.samples import IGNORED
from hookrun.data.settings import Data
from hookrun.engine.collector import collector_paused
from hookrun.errors import HookrunError, Lookup, listed
from hookrun.store.captures.read import (
    Leaf,
    SampleTable,
    StoredCapture,
    as_table,
    captured_tensors,
    read_captures,
)
from hookrun.store.captures.shard import index_names, read_index
from hookrun.store.captures.tensor_file import Chunks, read_tensors, write_tensors
from hookrun.store.config.stored import data_used, read_yaml
from hookrun.store.files import StoreError, by_number, os_reason, read_lines, replacing
from hookrun.store.format import (
    ATTRIBUTIONS,
    CAPTURES,
    CONFIG,
    ENV,
    FAULTS,
    GENERATIONS,
    HOOKS,
    LENS,
    MANIFEST,
    METRICS,
    MODEL,
    PLAN,
    PREDICTED,
    PREDICTIONS,
    STATS,
    STATUS,
)
from hookrun.store.manifest import read_manifest
from hookrun.store.records import (
    MOST_LISTED,
    STREAMS,
    Comparison,
    EnvRecord,
    FaultLine,
    GenerationLine,
    HooksRecord,
    LensLine,
    MetricsLine,
    ModelRecord,
    PlanRecord,
    Record,
    StatsLine,
    Status,
    read_record,
    read_records,
)
from hookrun.store.run_dir import cut_off
from hookrun.studies.compare import comparison
from hookrun.studies.compare.comparison import By, Cka
from hookrun.studies.effects.records import Effects, read_effects

Table = Literal["metrics", "stats", "faults", "samples"]
_SHOWN = 12
ROWS_AT_ONCE = 4096
"""The rows of a capture that are exported at a time."""


class Run:
    """A run directory. Each part is read when it is first used, and kept.

    path: the directory, links resolved
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def status(self) -> dict[str, Any]:
        """status.json as it is now: `status`, `reason`, `started`, `ended`, `pid`, `host`, `exit_code`, `manifest`."""
        return read_record(self.path / STATUS, Status)

    @cached_property
    def plan(self) -> dict[str, Any]:
        """plan.json; empty if the run ended before there was a plan. StoreError if it was removed since."""
        return self._record(PLAN, PlanRecord)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The configuration of the run; empty if it was not written."""
        content = read_yaml(self.path / CONFIG, self.path)
        return content if isinstance(content, dict) else {}

    @cached_property
    def env(self) -> dict[str, Any]:
        """env.json; empty if the run ended before it was written."""
        return self._record(ENV, EnvRecord)

    @cached_property
    def model(self) -> dict[str, Any]:
        """model.json: `class` and `modules`, one for each with path, names, class, parameters; empty if not written."""
        return self._record(MODEL, ModelRecord)

    @cached_property
    def hooks(self) -> dict[str, Any]:
        """hooks.json, written at the end: `sites`, the counts of each hook at each module; empty if not written."""
        return self._record(HOOKS, HooksRecord)

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl in order; NaN and infinities are floats.

        `of` is `epoch` for the means of a whole pass, and `batch` for single batches logged during training.
        """
        return read_records(self.path / METRICS, MetricsLine)

    @cached_property
    def stats(self) -> list[dict[str, Any]]:
        """The lines of stats.jsonl in order."""
        return read_records(self.path / STATS, StatsLine)

    @cached_property
    def faults(self) -> list[dict[str, Any]]:
        """The lines of faults.jsonl in order: one for each bit that `flip_bits` has flipped.

        With the keys of a line of stats.jsonl (hook, module, moment) and `sample`, `element`, `bit`, `before`, `after`.
        """
        return read_records(self.path / FAULTS, FaultLine)

    @cached_property
    def lens(self) -> list[dict[str, Any]]:
        """The lines of lens.jsonl, which task=lens writes, in order: one for each sample, part and position."""
        return read_records(self.path / LENS, LensLine)

    @cached_property
    def attributions(self) -> dict[str, Tensor]:
        """The tensors of attributions.safetensors, which task=attribute writes, each with a row for each sample.

        `attributions` (of several inputs `attributions.NAME`), `sample_ids`, `scores`, and for integrated gradients
        `delta`: by how much a sample's attributions miss the difference of its scores. Empty if the run has none.
        """
        path = self.path / ATTRIBUTIONS
        return read_tensors(path, self.path)[0] if os.path.lexists(path) else {}

    @cached_property
    def effects(self) -> Effects:
        """What task=effects found: `effects["exact"]` is a tensor, `effects.axes` has the labels of its dimensions.

        StoreError if the run has no effects.
        """
        effects = read_effects(self.path)
        if effects is None:
            raise StoreError(f"{self.path} has no effects: they are written by task=effects")
        return effects

    @cached_property
    def captures(self) -> Lookup[Lookup[Leaf]]:
        """Hook -> module -> a StoredCapture, or path -> StoredCapture if the module's value was a container.

        Any name of a module may be used.
        """
        return self._captures(CAPTURES)

    @cached_property
    def samples(self) -> SampleTable:
        """The names of the samples, which the tasks predict and evaluate write."""
        return SampleTable(self.path)

    @cached_property
    def generations(self) -> list[dict[str, Any]]:
        """The lines of generations.jsonl in the order of the samples; empty if the run did not generate.

        For each sample `prompt`, `prompt_ids`, `text`, `ids`, `reason`, `next`; with `task.without_hooks` also those
        without hooks (`text_without`, …) and `kl_first`.
        """
        return read_records(self.path / GENERATIONS, GenerationLine)

    @cached_property
    def predictions(self) -> Leaf | None:
        """The outputs of the model as a capture; None if the run did not write them."""
        hook, module = PREDICTED
        captures = self._captures(PREDICTIONS)
        return captures[hook][module] if captures else None

    @property
    def notes(self) -> list[str]:
        """Notes on a run that was cut off: its process has ended, or a last line is unfinished."""
        folders = (CAPTURES, PREDICTIONS)
        indexes = [f"{folder}/{name}" for folder in folders for name in index_names(self.path / folder)]
        notes = [self.cut_off] if self.cut_off else []
        for name in (*STREAMS, *indexes):
            for _ in read_lines(self.path / name, self.path, notes):
                pass
        return notes

    @property
    def cut_off(self) -> str:
        """A note if the status says `running` but the process has ended; else ``""``."""
        return cut_off(self.status)

    def data_info(self) -> DataInfo:
        """The description of the data that the run used, from its configuration; raises as `labels` does."""
        from hookrun import data

        used, split, _ = data_used(self.config, self.path / CONFIG)
        return data.describe(used, self._split() or split)

    def labels(self, sample_ids: Tensor, split: Split | None = None) -> Tensor:
        """[n, ...]: the labels of the samples [n], read again from the data that the run used.

        split: of the data; by default the split of the run's rows, or train if they are of both

        Of samples of tokens they are the targets of all positions, -100 where there is none.

        HookrunError if the run does not say which data it used, SpecError if the data cannot be found.
        """
        return self._labels(sample_ids, torch.full_like(sample_ids, -1), split)

    def _labels(self, sample_ids: Tensor, positions: Tensor, split: Split | None) -> Tensor:
        """As `labels`; if the positions [n] of tokens are not -1, the targets there."""
        from hookrun import data

        used, of_task, seed = data_used(self.config, self.path / CONFIG)
        samples = data.load(used, split or self._split() or of_task, seed=seed)
        outside = (sample_ids < 0) | (sample_ids >= len(samples))
        if outside.any():
            raise HookrunError(
                f"the data of {self.path} has no sample {int(sample_ids[outside][0])}: it has {len(samples)}"
            )
        numbers, sample_of = sample_ids.unique(return_inverse=True)
        if not samples.of_tokens:
            every = [self._target(used, samples[number]) for number in numbers.tolist()]
            return torch.stack(every)[sample_of]
        at_tokens, targets = bool((positions >= 0).all()), list[Tensor]()
        for inputs, target in map(samples.__getitem__, numbers.tolist()):
            assert isinstance(inputs, dict)  # they are of tokens
            targets.append(target[inputs["attention_mask"].bool()] if at_tokens else target)
        padded = pad_sequence(targets, batch_first=True, padding_value=IGNORED)
        if not at_tokens:
            return padded[sample_of]
        # Positions count without padding. A sequence that was continued has positions after its end.
        return F.pad(padded, (0, 1), value=IGNORED)[sample_of, positions.clamp(max=padded.shape[1])]

    def _target(self, used: Data, sample: Any) -> Tensor:
        """The target of a sample; HookrunError if the user's collate function does not give one to each sample."""
        if not used.has_own_collate:
            return torch.as_tensor(sample[1])
        from hookrun.data.collate import collate_of

        targets = collate_of(used)([sample])[1]
        if not isinstance(targets, Tensor) or targets.shape[:1] != (1,):
            raise HookrunError(f"{self.path}: '{used.collate}' does not return one target for each sample")
        return targets[0]

    def _split(self) -> Split | None:
        """The first split of any captured or predicted row; None if no row has one."""
        tensors = [*captured_tensors(self.captures), *captured_tensors(self._captures(PREDICTIONS))]
        parts = {part for tensor in tensors for part in tensor.split_numbers.unique().tolist() if part >= 0}
        return SPLITS[min(parts)] if parts else None

    def labels_of(self, capture: StoredCapture) -> Tensor:
        """[rows, ...]: the label of each row's sample; for rows of tokens the target at the row's position, or -100.

        HookrunError if a row does not belong to a sample.
        """
        ids, splits, positions = capture.sample_ids, capture.split_numbers, capture.positions
        if (ids < 0).any() or (splits < 0).any():
            raise HookrunError(
                f"{capture.label}: some rows do not belong to a sample of the data and have no label"
            )
        by_split = [
            self._labels(ids[splits == part], positions[splits == part], SPLITS[part])
            for part in splits.unique().tolist()
        ]
        return torch.cat(by_split)[splits.argsort(stable=True).argsort()]

    def dataset(self, capture: StoredCapture) -> Dataset[tuple[Tensor, ...]]:
        """The rows of a capture with the labels of their samples, for training a probe.

        An item is (row, label); rows are read from disk when needed.
        """
        labels = self.labels_of(capture)
        return StackDataset(capture, labels)  # type: ignore[arg-type]  # they have a length and items

    def table(
        self,
        of: Table = "metrics",
        form: Literal["pandas", "arrow"] = "pandas",
    ) -> Any:
        """metrics.jsonl, stats.jsonl, faults.jsonl or samples.jsonl as a pandas DataFrame or an Arrow table.

        There is a row for each line; keys that a line lacks are missing values. HookrunError if there is no such table,
        or the library is not installed.

        The samples have the columns `split`, `sample`, `file`, `class` and, for the task predict, `predicted_class`.
        """
        if of not in get_args(Table):
            raise HookrunError(f"there is no table {of!r}; there are: {', '.join(get_args(Table))}")
        rows: Sequence[Mapping[str, Any]] = self.samples.lines if of == "samples" else getattr(self, of)
        keys = dict.fromkeys(key for row in rows for key in row)
        return as_table({key: [row.get(key) for row in rows] for key in keys}, form)

    def compare(
        self,
        other: Run | str | os.PathLike[str],
        *,
        by: Sequence[By] = ("module",),
        tolerance: float = 1e-3,
        cka: Cka | None = None,
    ) -> Comparison:
        """How this run differs from another one, given as a run or its directory, with the tables of task=compare.

        Captures are paired by hook and module, their rows by sample, epoch, call and token.

        by:        module, and tokens: each position of a token by itself
        tolerance: a row differs if the norm of its difference is above this times the norm of the row of this run;
                   metrics and statistics if they differ by more than this times the larger one
        cka:       computes the CKA of the rows of two captures; None: it is not computed

        Raises StoreError if a file of a run is missing or damaged.
        """
        run = other if isinstance(other, Run) else open_run(other)
        first, captures, unpaired = comparison.compare_captures(
            self.captures,
            run.captures,
            self.samples.by_sample,
            by=by,
            tolerance=tolerance,
            # A learning rate was logged, or it is a run of an own loop.
            trains=not self.config or any("lr" in line for line in self.metrics),
            cka=cka,
        )
        file, other_file = (
            comparison.weights_file(each.path, each.model.get("weights")) for each in (self, run)
        )
        weights, weights_of = comparison.weights(file, other_file, tolerance)
        here, there = (comparison.predicted(each.samples, each.generations) for each in (self, run))
        found = Comparison.model_construct(
            run=str(self.path),
            other=str(run.path),
            first=first,
            captures=captures,
            unpaired=unpaired,
            metrics=comparison.side_by_side(_measured(self), _measured(run), tolerance),
            predictions=comparison.predictions(
                here, there, self.predictions, run.predictions, self.samples, tolerance
            ),
            weights=weights,
            weights_of=weights_of,
            statistics=comparison.differing(
                comparison.statistics(self.stats), comparison.statistics(run.stats), tolerance
            )[:MOST_LISTED],
            plan=comparison.differing(comparison.plan(self.plan), comparison.plan(run.plan)),
            config=comparison.differing(self.config, run.config),
        )
        return found.model_copy(update={"reasons": list(comparison.reasons(found))})

    def export(self, path: str | os.PathLike[str]) -> list[str]:
        """Write every capture into one safetensors file, and return its keys.

        A capture is called ``hook/module`` (``hook/module/path`` within a container), its sample ids
        ``hook/module.sample_ids``. Raises HookrunError if the rows of a capture differ in shape.
        """
        target = Path(path).expanduser()
        if target.suffix != ".safetensors":
            raise HookrunError(
                f"captures are exported as .safetensors, not {target.name}; run.table() is for metrics"
            )
        tensors = dict[str, Tensor | Chunks]()
        for capture in captured_tensors(self.captures):
            name = "/".join([capture.hook, capture.module, *filter(None, [capture.path])])
            tensors[name] = Chunks(capture.dtype, capture.shape, capture.batches(ROWS_AT_ONCE))
            tensors[f"{name}.sample_ids"] = capture.sample_ids
        if not tensors:
            raise HookrunError("the run captured nothing: there is nothing to export")
        with replacing(target) as file:
            write_tensors(file, tensors)
        return list(tensors)

    def __repr__(self) -> str:
        return f"<run {self.path}: {self.status['status']}>"

    def _record(self, name: str, model: type[Record]) -> dict[str, Any]:
        if os.path.lexists(self.path / name):
            return read_record(self.path / name, model)
        sha256 = self.status.get("manifest")
        if sha256 and name in read_manifest(self.path, sha256):
            raise StoreError(f"{self.path / name} is missing: the run wrote it, as {MANIFEST} says")
        return {}

    def _captures(self, name: str) -> Lookup[Lookup[Leaf]]:
        folder = self.path / name
        stored_as = {
            name: target["path"]
            for hook in self.plan.get("hooks", [])
            for target in hook.get("targets", [])
            for name in target.get("names", [])
        }
        with collector_paused():
            return read_captures(folder, read_index(folder), stored_as, self.samples)


def open_run(path: str | os.PathLike[str]) -> Run:
    """Open the run directory at `path`. StoreError if it is not one; the message says what it is and what to do.

    `path` itself may be a link; links inside the directory are not followed.
    """
    try:
        folder = Path(path).expanduser().resolve()  # the link `latest` may change while the run is read
        if os.path.lexists(folder / STATUS):
            return Run(folder)
        raise StoreError(_not_a_run(folder))
    except (
        OSError,
        RuntimeError,
        ValueError,
    ) as error:  # a name too long, links in a circle, a null character
        said = os_reason(error) if isinstance(error, OSError) else str(error)
        raise StoreError(f"cannot open {os.fspath(path)!r:.300}: {said}") from error


def _not_a_run(folder: Path) -> str:
    if folder.is_file():
        return f"{folder} is a file, not a run directory: open the directory that holds status.json"
    if not folder.is_dir():
        parent = next(parent for parent in folder.parents if parent.is_dir())
        return f"there is no {folder}; the nearest directory is {parent}, {_content(parent)}"
    found = [entry.parent for entry in folder.glob(f"*/{STATUS}")]
    # the link `latest` leads to one of them
    jobs = sorted((job for job in found if not job.is_symlink()), key=lambda job: by_number(job.name))
    if not jobs:
        return f"{folder} is not a run directory: it has no {STATUS}; it is {_content(folder)}"
    kind = "a sweep" if (folder / "multirun.yaml").exists() or jobs[0].name.isdigit() else "a folder"
    names = listed([job.name for job in jobs], _SHOWN)
    return f"{folder} is {kind} of {len(jobs)} runs: {names}\nOpen one of them: open_run({str(jobs[-1])!r})"


def _content(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir())
    return f"with {listed(names, _SHOWN)}" if names else "empty"


def _measured(run: Run) -> dict[str, float]:
    """The metrics of whole passes, and the effects of each cell."""
    effects = read_effects(run.path)
    return comparison.metrics(run.metrics) | ({} if effects is None else effects.of_cells())
