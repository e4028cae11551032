"""`open_run`: a run directory as one lazy object."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import chain
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
from hookrun.engine.html import Shown, View
from hookrun.engine.values.folded import Folded
from hookrun.errors import HookrunError, Lookup, listed
from hookrun.store.captures.read import (
    Leaf,
    SampleTable,
    StoredCapture,
    captured_tensors,
    chosen_tensors,
    read_captures,
)
from hookrun.store.captures.shard import index_names, read_index
from hookrun.store.captures.tensor_file import Chunks, write_tensors
from hookrun.store.config.stored import data_used, read_yaml
from hookrun.store.export import ARROW, PARQUET, export_rows
from hookrun.store.files import StoreError, by_number, os_reason, read_whole, replacing
from hookrun.store.folds import read_folds
from hookrun.store.format import (
    CAPTURES,
    CONFIG,
    ENV,
    FAULTS,
    HOOKS,
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
    EnvRecord,
    FaultLine,
    HooksRecord,
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
from hookrun.store.studies import ask_report, ask_study, streams
from hookrun.store.summary import headline, summary_of
from hookrun.store.tables import as_table

Table = Literal["metrics", "stats", "faults", "samples"]
_SHOWN = 12
ROWS_AT_ONCE = 4096
"""The rows of a capture that are exported at a time."""


class Run(Shown):
    """A run directory. Each part is read when it is first used, and kept.

    path: the directory, links resolved
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def status(self) -> dict[str, Any]:
        """status.json as it is now: `status`, `reason`, `started`, `ended`, `pid`, `host`, `exit_code`, `manifest`.

        Once the run has ended also `summary`: what it did, in a few words.
        """
        return read_record(self.path / STATUS, Status)

    @cached_property
    def plan(self) -> dict[str, Any]:
        """plan.json; empty if the run ended before there was a plan. StoreError if it was removed since."""
        return self._record(PLAN, PlanRecord)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The configuration of the run; empty if it was not written."""
        content = read_yaml(self.path / CONFIG, self.path)
        if not isinstance(content, dict):
            return {}
        return content

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
        lines: list[dict[str, Any]] = ask_study("lens_of", self)
        return lines

    @cached_property
    def attributions(self) -> dict[str, Tensor]:
        """The tensors of attributions.safetensors, which task=attribute writes, each with a row for each sample.

        `attributions` (of several inputs `attributions.NAME`), `sample_ids`, `scores`, and for integrated gradients
        `delta`: by how much a sample's attributions miss the difference of its scores. Empty if the run has none.
        """
        tensors: dict[str, Tensor] = ask_study("attributions_of", self)
        return tensors

    @cached_property
    def effects(self) -> Any:
        """What task=effects found: `effects["exact"]` is a tensor, `effects.axes` has the labels of its dimensions.

        StoreError if the run has no effects.
        """
        return ask_study("effects_of", self)

    @cached_property
    def captures(self) -> Lookup[Lookup[Leaf]]:
        """Hook -> module -> a StoredCapture, or path -> StoredCapture if the module's value was a container.

        Any name of a module may be used.
        """
        return self._captures(CAPTURES)

    @cached_property
    def folds(self) -> Lookup[Lookup[Folded]]:
        """Hook -> module -> what the action `fold` has accumulated: `mean`, `cov`, `quantiles`, `top`, `labels`.

        Any name of a module may be used. StoreError if folds.safetensors is damaged.
        """
        return read_folds(self.path, self._stored_as)

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
        lines: list[dict[str, Any]] = ask_study("generations_of", self)
        return lines

    @cached_property
    def predictions(self) -> Leaf | None:
        """The outputs of the model as a capture; None if the run did not write them."""
        hook, module = PREDICTED
        captures = self._captures(PREDICTIONS)
        if not captures:
            return None
        return captures[hook][module]

    @property
    def notes(self) -> list[str]:
        """Notes on a run that was cut off: its process has ended, or a last line is unfinished."""
        files = list(streams())
        for folder in (CAPTURES, PREDICTIONS):
            files += [f"{folder}/{name}" for name in index_names(self.path / folder)]
        notes: list[str] = []
        if self.cut_off:
            notes.append(self.cut_off)
        for name in files:
            read_whole(self.path / name, self.path, notes)
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
            by_number = [self._target(used, samples[number]) for number in numbers.tolist()]
            return torch.stack(by_number)[sample_of]
        at_tokens = bool((positions >= 0).all())
        targets: list[Tensor] = []
        for inputs, target in map(samples.__getitem__, numbers.tolist()):
            assert isinstance(inputs, dict)  # they are of tokens
            if at_tokens:
                target = target[inputs["attention_mask"].bool()]
            targets.append(target)
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
        parts = set[int]()
        for tensor in tensors:
            parts.update(tensor.split_numbers.unique().tolist())
        parts.discard(-1)
        if not parts:
            return None
        return SPLITS[min(parts)]

    def labels_of(self, capture: StoredCapture) -> Tensor:
        """[rows, ...]: the label of each row's sample; for rows of tokens the target at the row's position, or -100.

        HookrunError if a row does not belong to a sample.
        """
        ids = capture.sample_ids
        splits = capture.split_numbers
        positions = capture.positions
        if (ids < 0).any() or (splits < 0).any():
            raise HookrunError(
                f"{capture.label}: some rows do not belong to a sample of the data and have no label"
            )
        by_split: list[Tensor] = []
        for part in splits.unique().tolist():
            of_split = splits == part
            by_split.append(self._labels(ids[of_split], positions[of_split], SPLITS[part]))
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
        rows = self.samples.lines if of == "samples" else getattr(self, of)
        columns = {key: [row.get(key) for row in rows] for key in dict.fromkeys(chain.from_iterable(rows))}
        return as_table(columns, form)

    def compare(
        self,
        other: Run | str | os.PathLike[str],
        *,
        by: Sequence[Literal["module", "tokens"]] = ("module",),
        tolerance: float = 1e-3,
        cka: Callable[[StoredCapture, StoredCapture], float | None] | None = None,
        names: Mapping[Any, Any] | str | os.PathLike[str] | None = None,
        transpose: Mapping[Any, Sequence[int]] | None = None,
    ) -> Any:
        """How this run differs from another one, given as a run or its directory, with the tables of task=compare.

        Captures are paired by hook and module, their rows by sample, epoch, call and token.

        by:        module, and tokens: each position of a token by itself
        tolerance: a row differs if the norm of its difference is above this times the norm of the row of this run;
                   metrics and statistics if they differ by more than this times the larger one
        cka:       computes the CKA of the rows of two captures; None: it is not computed
        names:     globs of this run's modules -> globs of the other run's that belong to them, wildcards one to one:
                   ``{"model.layers.*.mlp": "blocks.*.ffn"}``; or a YAML file with these. Modules that they do not name
                   belong to those of the same name, and what has no partner does not count as a difference
        transpose: globs of the other run's modules -> the dimensions of their captures, of which 0 is the rows, in the
                   order of this run's: ``{"blocks.*.z": [0, 2, 1, 3]}``

        Raises StoreError if a file of a run is missing or damaged, SpecError for names that do not fit the runs,
        HookrunError for another `by` or `tolerance`.
        """
        columns = {by} if isinstance(by, str) else {*by}
        if not columns <= {"module", "tokens"} or not tolerance >= 0:
            found = f"found by={by!r}, tolerance={tolerance!r}"
            raise HookrunError(f"compare: {found}; expected module and tokens, and a tolerance of at least 0")
        if not isinstance(other, Run):
            other = open_run(other)
        return ask_study("compare_runs", self, other, tuple(columns), tolerance, cka, names, transpose)

    def plot(self, metric: str) -> Any:
        """The chart of a metric, such as ``run.plot("loss")``: notebooks show it, `save` writes it into a file.

        The name of a hook stands for what the page draws of its records, such as a ridge of histograms. HookrunError
        with the nearest names if there is no such metric or hook.
        """
        return ask_report("plot_of_metric", self.path, metric)

    def show(self) -> None:
        """Show the page of the run in the notebook; elsewhere print its path. It is made if it does not exist."""
        ask_report("show_page", self.path)

    def export(
        self,
        path: str | os.PathLike[str],
        capture: str | None = None,
        module: str | None = None,
    ) -> list[str]:
        """Write captured rows for other programs, and return the names of what was written.

        path:    ``rows.parquet`` or ``rows.arrow``: a table with a line for each row, see `export_rows`;
                 ``rows.safetensors``: each capture as a tensor ``hook/module`` (``hook/module/path`` within a
                 container), its sample ids as ``hook/module.sample_ids``; or a folder, new or empty: a Parquet file
                 for each capture, numbered in the order of the names
        capture: the hook whose captures are written; None: all of them
        module:  any name of a module, ``encoder [0]`` for one tensor of a container; None: all of them

        HookrunError if pyarrow is missing, the rows of a capture differ in shape, or several kinds of rows were to go
        into one table; StoreError if the folder is not empty, or nothing can be written: a file that was there stays.
        """
        target = Path(path).expanduser()
        if target.suffix not in ("", PARQUET, ARROW, ".safetensors"):
            raise HookrunError(
                f"captures are exported as .parquet, .arrow, into a folder, or as .safetensors, not {target.name}; "
                "run.table() is for metrics"
            )
        chosen = chosen_tensors(self.captures, capture, module)
        if not chosen:
            raise HookrunError("the run captured nothing: there is nothing to export")
        if target.is_dir() and any(target.iterdir()):
            raise StoreError(f"{target} is a folder that is not empty: give another name")
        names: list[str] = []
        for each in chosen:
            name = f"{each.hook}/{each.module}"
            names.append(f"{name}/{each.path}" if each.path else name)
        if target.suffix != ".safetensors":
            export_rows(target, chosen)
            return names
        tensors: dict[str, Tensor | Chunks] = {}
        for name, each in zip(names, chosen, strict=True):
            tensors[name] = Chunks(each.dtype, each.shape, each.batches(ROWS_AT_ONCE))
            tensors[f"{name}.sample_ids"] = each.sample_ids
        with replacing(target) as file:
            write_tensors(file, tensors)
        return list(tensors)

    def __repr__(self) -> str:
        return f"<run {self.path}: {summary_of(self.path).status}>"

    def _view(self) -> View:
        summary = summary_of(self.path)
        rows = [(name, getattr(summary, name)) for name in ("status", "started", "duration")]
        lines = list(filter(None, (summary.note, summary.reason, summary.damaged)))
        title = f"{headline(summary)} · {self.path}"
        return View(title, ("", ""), [*rows, *summary.metrics.items()], lines=lines)

    def _record(self, name: str, model: type[Record]) -> dict[str, Any]:
        if os.path.lexists(self.path / name):
            return read_record(self.path / name, model)
        sha256 = self.status.get("manifest")
        if sha256 and name in read_manifest(self.path, sha256):
            raise StoreError(f"{self.path / name} is missing: the run wrote it, as {MANIFEST} says")
        return {}

    def _captures(self, name: str) -> Lookup[Lookup[Leaf]]:
        folder = self.path / name
        with collector_paused():
            return read_captures(folder, read_index(folder), self._stored_as, self.samples)

    @property
    def _stored_as(self) -> dict[str, str]:
        """Every name of a hooked module -> its path."""
        stored_as: dict[str, str] = {}
        for hook in self.plan.get("hooks", []):
            for target in hook.get("targets", []):
                stored_as |= dict.fromkeys(target.get("names", []), target["path"])
        return stored_as


def open_run(path: str | os.PathLike[str]) -> Run:
    """Open the run directory at `path`. StoreError if it is not one; the message says what it is and what to do.

    `path` itself may be a link; links inside the directory are not followed.
    """
    try:
        folder = Path(path).expanduser().resolve()  # the link `latest` may change while the run is read
        if os.path.lexists(folder / STATUS):
            return Run(folder)
        raise StoreError(_not_a_run(folder))
    except OSError as error:  # a name too long
        raise StoreError(f"cannot open {os.fspath(path)!r:.300}: {os_reason(error)}") from error
    except (RuntimeError, ValueError) as error:  # links in a circle, a null character
        raise StoreError(f"cannot open {os.fspath(path)!r:.300}: {error}") from error


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
        what = f"{folder} is not a run directory: it has no {STATUS}; it is {_content(folder)}"
        if any(folder.glob("*.safetensors")):
            what += (
                '\nFiles of another program are read with rows: {pattern: "*.safetensors", key: "layers.*"}'
            )
        return what
    kind = "a sweep" if (folder / "multirun.yaml").exists() or jobs[0].name.isdigit() else "a folder"
    names = listed([job.name for job in jobs], _SHOWN)
    return f"{folder} is {kind} of {len(jobs)} runs: {names}\nOpen one of them: open_run({str(jobs[-1])!r})"


def _content(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir())
    return f"with {listed(names, _SHOWN)}" if names else "empty"
