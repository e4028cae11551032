"""Receives the records of a run's hooks: writes captures and statistics to the run directory, and prints lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hookrun.data import Split
from hookrun.engine.actions.base import OF_RANK, Keeper, TokenRows
from hookrun.engine.plan.texts import decoder_of
from hookrun.engine.runtime.records import Budget, RecordSink
from hookrun.engine.runtime.site import HookSite
from hookrun.engine.runtime.snapshot import TRACED, copied, in_reach, opened
from hookrun.engine.values.containers import readable
from hookrun.run.passes.loggers import Loggers
from hookrun.run.ranks import share
from hookrun.store.format import FAULTS, STATS, TOKENS
from hookrun.store.run_dir import RunDir


class RunSink(RecordSink):
    """Writes captures to disk, keyed by the samples of the current batch.

    split:    the split of the current batch
    loggers:  the loggers that show records live
    rank_local_hooks: the names of the hooks that see only a rank's own rows of a batch, or act only on some ranks
    bytes:    hook -> the total bytes of the tensors that it has counted
    numbered: how many rows of batches whose sample ids are not known were numbered
    without_batch: hook -> the modules where its captures have a row for each firing, because it is not known which
              dimension is the batch, or that is not as long as there are samples
    """

    wants_calls = True
    stores_rows = True

    def __init__(self, run_dir: RunDir, show: Callable[[str], None], loggers: Loggers | None = None) -> None:
        super().__init__()
        self.bytes = Counter[str]()
        self.rank_local_hooks: Collection[str] = ()
        self.without_batch = dict[str, dict[str, None]]()
        self.split: Split | None = None
        self.loggers = loggers if loggers is not None else Loggers()
        self._texts_known = set[int]()
        self.number_from(0)
        self._run_dir = run_dir
        self._show = show

    def keeper(self, site: HookSite) -> Keeper:
        """The function that writes each captured value immediately; the writer copies it."""
        writer = self._run_dir.captures
        clock = site.clock
        loggers = self.loggers
        if not self._run_dir.ranks.is_main and site.hook_name not in self.rank_local_hooks:
            return lambda *captured: None  # rank 0 writes it: it is the same on every rank

        def batch_dim(path: str, shape: Sequence[int]) -> int | None:
            if self._has_one_sample(site):
                return 0
            dim = None
            is_other = not site.captured.is_known
            if site.captured.is_known:
                dim = site.captured.of(path)
                samples = self._samples(site)
                is_other = (
                    dim is not None and samples is not None and tuple(shape[dim : dim + 1]) != (len(samples),)
                )
            if is_other:
                self.without_batch.setdefault(site.hook_name, {})[site.path] = None
            return dim

        def keep(value: Any, rows: Tensor | None = None, tokens: TokenRows | None = None) -> None:
            if self.muted or (value := in_reach(value)) is TRACED:
                return
            is_whole = rows is None and tokens is None
            ids = None
            if not site.hook_type.on_parameters:  # a bias of 64 elements is not a batch of 64 samples
                ids = self._samples(site)
            if tokens is not None and ids is None:
                ids = tokens.numbers
            elif rows is not None and ids is not None:
                ids = ids[readable(rows)]
            with torch._C._DisableFuncTorch():
                if not isinstance(value, Tensor):
                    value = opened(value)
                if is_whole and not site.hook_type.on_parameters and self._has_one_sample(site):
                    value = copied(value, _with_batch)
                writer.add(
                    site.hook_name,
                    site.path,
                    value,
                    sample_ids=ids,
                    batch_dim=batch_dim if is_whole else _rows_first,
                    epoch=clock.epoch,
                    step=clock.step,
                    call=site.call,
                    split=self.split,
                    path=site.current.within,
                    tokens=tokens,
                )
                if tokens is not None and (decode := decoder_of(site.tokenizer)) is not None:
                    self.log_texts(decode, tokens.token_ids.tolist())
                if clock.counting:
                    loggers.tell(lambda logger: logger.value(site, value))

        return self.within_budget(site, keep)

    def number_from(self, first: int) -> None:
        """Number the following rows from this number on."""
        self.numbered = self._first = first
        self._numbered_of = dict[object, int]()

    def _samples(self, site: HookSite) -> Tensor | None:
        """The sample ids of the current batch, or the numbers of its rows; None: not known."""
        if site.clock.samples is not None:
            return site.clock.samples
        return self.counted

    def _has_one_sample(self, site: HookSite) -> bool:
        """Whether all that the site sees is of one sample: the batch has one, and no dimension of it is known."""
        samples = site.clock.samples
        return not site.captured.is_known and samples is not None and len(samples) == 1

    def first_rows(self, tensor: Tensor, dim: int, count: int) -> Tensor:
        """The first rows, as they are written: with the batch first."""
        return super().first_rows(tensor, dim, count).movedim(dim, 0)

    def number(self, count: int, seen_by: Sequence[object] = ()) -> None:
        """Begin a batch of `count` rows whose sample ids are not known: they are numbered on.

        seen_by: the hooked modules that get them, each of which has seen none of these numbers before; two encoders
                 that get the same samples, one after the other, thus number them alike
        """
        if not self.muted:
            keys = seen_by or (None,)
            first = max(self._numbered_of.get(key, self._first) for key in keys)
            self.numbered = first + count
            self._numbered_of.update(dict.fromkeys(keys, self.numbered))
            self.counted = torch.arange(first, self.numbered, device="cpu")

    def within_budget(self, site: HookSite, keep: Keeper) -> Keeper:
        """`keep`, limited by the hook's `max_bytes`, which the ranks divide among themselves."""
        limit = site.spec.byte_limit
        ranks = self._run_dir.ranks
        if limit is not None and site.hook_type.sees_batch:
            part = len(share(limit, ranks.rank, ranks.size))
            self._budgets.setdefault(site.hook_name, Budget(part))
        return super().within_budget(site, keep)

    def state_dict(self) -> dict[str, Any]:
        """Its state between two steps; pending records are written to stats.jsonl before."""
        return {
            **super().state_dict(),
            "bytes": dict(self.bytes),
            "split": self.split,
            "texts": sorted(self._texts_known),
            "numbered": self.numbered,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace its state by a saved one."""
        super().load_state_dict(state)
        self.bytes = Counter(state["bytes"])
        self.split = state["split"]
        self._texts_known = set(state["texts"])
        self.number_from(state.get("numbered", 0))  # states of earlier versions lack it

    def log_texts(self, decode: Callable[[int], str | None], tokens: Iterable[int]) -> None:
        """Record the texts of tokens that are not recorded yet; tokens that `decode` does not know are left out."""
        new = set(tokens) - self._texts_known - {-1}
        self._texts_known |= new
        for token in sorted(new):
            if (text := decode(token)) is not None:
                self._run_dir.append(TOKENS, [{"token": token, "text": text}])

    def show(self, text: str) -> None:
        """Print the line of a `print` action above the progress bar."""
        self._show(text)

    def store(self, record: dict[str, Any]) -> None:
        """Append to stats.jsonl or faults.jsonl.

        Each rank writes records of its own rows; what is the same on each, rank 0 writes.
        """
        ranks = self._run_dir.ranks
        if ranks.several:
            if record["hook"] in self.rank_local_hooks:
                record = {**record, OF_RANK: ranks.rank}
            elif not ranks.is_main:
                return
        if "bit" in record:
            self._run_dir.append(FAULTS, [record])
            return
        self.bytes[record["hook"]] += record.get("bytes", 0)
        self._run_dir.append(STATS, [record])
        self.loggers.tell(lambda logger: logger.record(record))


def _rows_first(path: str, shape: Sequence[int]) -> int:
    """The dimension of the rows in a value that consists of chosen rows."""
    return 0


def _with_batch(tensor: Tensor) -> Tensor:
    """What belongs to one sample, with the batch as its first dimension."""
    return tensor if tensor.dim() and len(tensor) == 1 else tensor.unsqueeze(0)
