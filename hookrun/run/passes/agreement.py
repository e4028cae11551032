"""What the ranks of a run must have in common, compared before it: settings, plan, weights, versions, files, data."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from hookrun import data
from hookrun.data import Split
from hookrun.engine.values.containers import members
from hookrun.errors import SpecError, first_lines, spec_error
from hookrun.run.experiment.checksums import content_of, crc_of
from hookrun.run.experiment.prepared import Prepared
from hookrun.run.experiment.task import Ready
from hookrun.run.passes.batches import numbered
from hookrun.run.passes.resuming import about, shown
from hookrun.run.ranks import Ranks
from hookrun.store.format import STATUS, differences, encode

_OWN = {"compute": ("device", "threads", "capture_buffer"), "data": ("workers",)}
"""Keys that may differ from rank to rank, since the values computed do not depend on them."""

_LAG = 5.0
"""Seconds after which what rank 0 has written must be seen by the other ranks."""


def read_splits(ready: Ready) -> Prepared:
    """Read the splits of the task, which then need not be read again for the run."""
    prepared = cast(Prepared, ready)  # as is every task that several ranks do
    task: Any = prepared.task  # a TaskUnderHooks
    for split in task.splits:
        if prepared.data.sizes[split] != 0 or len(task.splits) == 1:
            prepared.read[split] = data.load(prepared.settings.data, split, seed=prepared.settings.seed)
    return prepared


def facts_of_rank(ready: Ready, run_dir: Path) -> dict[str, Any]:
    """What has to be equal on every rank, by key path; it reads the splits of the task.

    run_dir: the directory of the run as this rank names it, whose name may hold the time
    """
    prepared = read_splits(ready)
    facts = about(prepared, run_dir)
    facts["train"]["checkpoint"] = prepared.settings.train.checkpoint.model_dump(mode="json")
    facts["compute"]["strategy"] = prepared.settings.compute.strategy
    for section, keys in _OWN.items():
        for key in keys:
            del facts[section][key]
    facts["compute"]["type of device"] = prepared.device.type
    for hook in facts["hooks"].values():
        # without shapes: the trial run of a hook with `when.rank` sees nothing on other ranks
        hook["targets"] = [target["path"] for target in hook["targets"]]
    for run in facts["plan"].get("runs", ()):
        del run["path"]
    for name, content in facts["files"].items():
        # of a folder behind a link, whose target may have another name on each node, only what is in it counts
        inside = content.removeprefix(str(Path(name).expanduser().resolve()))
        facts["files"][name] = crc_of(inside.encode())
    tensors = [*prepared.model.named_parameters(), *prepared.model.named_buffers()]
    facts["parameters"] = {name: " ".join(content_of(tensor)) for name, tensor in tensors}
    facts["samples"] = {split: _samples(prepared, split) for split in prepared.read}
    named = encode(str(run_dir)).strip('"')
    return json.loads(encode(facts).replace(named, "the run directory"))


def differing_ranks(facts: Sequence[Mapping[str, Any]]) -> SpecError:
    """The error that names each difference to rank 0. facts: of each rank, from `facts_of_rank`."""
    lines: list[str] = []
    for rank, other in enumerate(facts):
        for key, main, its in differences(facts[0], other):
            lines.append(f"rank {rank} has {key} {shown(its)}, rank 0 has {shown(main)}")
    listed = "\n".join(f"    {line}" for line in first_lines(lines))
    return spec_error(
        "compute.strategy",
        f"the processes would not do the same run:\n{listed}",
        "start all of them with the same settings, files and versions",
    )


def require_shared_disk(run: Path, ranks: Ranks, ready: Ready, *, resumes: bool) -> None:
    """Raise SpecError on every rank if ranks other than 0 use the directory `run` and one does not see it.

    Each has to read the status that rank 0 has just written, and waits a few seconds for a disk that lags. Every rank
    calls it.
    """
    if not ranks.several or not (resumes or _every_rank_writes(ready)):
        return
    path = run / STATUS
    end = time.monotonic() + _LAG
    written = ranks.gathered(_text(path))[0]
    while (seen := _text(path)) != written and time.monotonic() < end:
        time.sleep(0.05)
    blind = None if seen == written else platform.node()
    for rank, host in enumerate(ranks.gathered(blind)):
        if host is not None:
            raise spec_error(
                "hydra.run.dir",
                f"rank {rank} on {host} does not see the run directory of rank 0, {run}",
                "it has to be on a disk that all nodes share, since each rank reads or writes there",
            )


def _every_rank_writes(ready: Ready) -> bool:
    """Whether ranks other than 0 write rows: those that a hook captures, or those of the task."""
    if ready.task.writes_rows or not isinstance(ready, Prepared):
        return ready.task.writes_rows
    for hook in ready.plan.hooks:
        if not hook.spec.action.captures:
            continue
        chosen = hook.spec.keys.when.rank
        if any(chosen) if chosen else hook.spec.hook_type.sees_batch:
            return True
    return False


def _text(path: Path) -> str | None:
    """The content of a small file; None if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _samples(prepared: Prepared, split: Split) -> dict[str, Any]:
    """The number of samples, and the content of the first, the middle and the last one.

    Random transforms draw as in the first epoch. Of a sample that is another one each time that it is read, since a
    user's own code draws from a generator of its own, only the form counts.
    """
    samples = numbered(prepared.settings, prepared.read[split])
    count = len(samples.samples)
    facts: dict[str, Any] = {"number": count}
    if not count:
        return facts
    for name, number in (("first", 0), ("middle", count // 2), ("last", count - 1)):
        try:
            sample = list(map(content_of, members(samples.sample(number))))
            again = list(map(content_of, members(samples.sample(number))))
        except Exception as error:  # of a user's own code; the run fails if it needs the sample
            facts[name] = f"cannot be read: {type(error).__name__}"
            continue
        forms = ", ".join(form for form, _ in sample)
        content = "random"
        if sample == again:
            content = crc_of("".join(checksum for _, checksum in sample).encode())
        facts[name] = f"{content} ({forms})"
    return facts
