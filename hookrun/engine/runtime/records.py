"""The sinks of records and captured values: their base class, and `Memory` for the Python API."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hookrun.engine.actions.base import ABOUT, FORMS, MOST_FAULTS, RECORD_KEYS, Keeper, Measured, TokenRows
from hookrun.engine.actions.check import LastPassed, verdict
from hookrun.engine.plan.texts import decoder_of
from hookrun.engine.runtime.fast.copies import KeptInMemory, held_bytes
from hookrun.engine.runtime.fast.small_tensors import SmallTensors, Waiting, computes
from hookrun.engine.runtime.sinks import Sink
from hookrun.engine.runtime.site import HookSite
from hookrun.engine.runtime.snapshot import TRACED, append_copy, copied, held, in_reach, snapshot
from hookrun.engine.values.containers import readable
from hookrun.engine.values.tensors import read_together
from hookrun.errors import CheckFailed, HookError, printable, reason


@dataclass(slots=True)
class Budget:
    """The bytes that a hook may keep, all its modules together.

    spent: a value did not fit, and nothing is kept any more
    """

    limit: int
    used: int = 0
    spent: bool = False


def batch_rows(site: HookSite, value: Any, rows: Tensor | None) -> tuple[int, int]:
    """How many rows of the batch the value has, and along which dimension; 0 rows if it has no batch dimension.

    rows: the places of the value's rows in the batch, which come first; None: 0, 1, 2, …
    """
    dim: int | None = 0
    if rows is None and site.captured.is_known:
        dim = site.captured.of("") if site.captured.is_uniform else None
    lengths = set[int]()
    for x in held(value):
        has_dim = dim is not None and dim < x.dim() and x.layout is torch.strided and not x.is_nested
        lengths.add(x.shape[dim] if has_dim and dim is not None else 0)
    count = lengths.pop() if len(lengths) == 1 else 0
    samples = site.clock.samples if rows is None else rows
    has_all = samples is None or len(samples) == count
    return (count if site.hook_type.batch and has_all else 0), dim or 0


class RecordSink(Sink):
    """Collects records and reads their tensors together later, so that a hook never waits for the device."""

    def __init__(self) -> None:
        self.last_good = LastPassed()
        self._pending = list[dict[str, Any] | Waiting]()
        self._statistics = SmallTensors()
        self._budgets = dict[str, Budget]()
        self._faults = Counter[str]()
        self._may_fail = False  # a rule with the policy `error` is to judge a step
        self._failed: str | None = None

    def within_budget(self, site: HookSite, keep: Keeper) -> Keeper:
        """`keep` until the hook's `max_bytes` are used up; of the value that does not fit, the rows that still do."""
        limit = site.spec.byte_limit
        if limit is None:
            return keep
        budget = self._budgets.setdefault(site.hook_name, Budget(limit))

        def limited(value: Any, rows: Tensor | None = None, tokens: TokenRows | None = None) -> None:
            if budget.spent or (value := in_reach(value)) is TRACED:
                return
            size = self.size(value)
            left = budget.limit - budget.used
            if size <= left:
                budget.used += size
                keep(value, rows, tokens)
                return
            budget.spent = True
            count, dim = batch_rows(site, value, rows)
            if count:
                fitting = min(left // max(size // count, 1), count)
                budget.used += size // count * fitting
                if fitting:
                    first = torch.arange(fitting, device="cpu")
                    if tokens is not None:
                        tokens = tokens.at(first)
                    part = copied(value, lambda tensor: self.first_rows(tensor.detach(), dim, fitting))
                    keep(part, first if rows is None else rows[:fitting], tokens)
            used = f"{budget.used:,} of {budget.limit:,} bytes"
            self.show(
                f"{site.hook_name}: its max_bytes are used up ({used}) at epoch {site.clock.epoch}, step "
                f"{site.clock.step}: it captures nothing more"
            )
            site.emit({"spent": budget.limit})

        return limited

    def first_rows(self, tensor: Tensor, dim: int, count: int) -> Tensor:
        """The first rows of a batch along a dimension of the tensor."""
        return tensor.narrow(dim, 0, count)

    def size(self, value: Any) -> int:
        """The bytes that a captured value takes: those of all its tensors, as on disk."""
        return sum(tensor.numel() * tensor.element_size() for tensor in held(value))

    def emit(self, start: tuple[Any, ...], data: Mapping[str, Any] | Measured, *, show: bool = False) -> None:
        """Take a record; `show`: print it at once.

        Statistics may be computed by `settle`. Tensors that `torch.func` has wrapped are unwrapped. Records of a model
        that is being traced are ignored, since their tensors have no values. Raises HookError for a meta tensor.
        """
        if self.muted:
            return
        record: dict[str, Any] | Waiting | None = None
        if isinstance(data, Measured):
            if data.of:
                record = self._statistics.add(data.x, data.of, start)
            if record is None:
                data = data.now(data.x, computes())
        if not isinstance(data, Measured):
            record = self._taken(start, data, show=show)
        if record is not None:
            self._wait(record)

    def emit_together(self, numbers: Tensor, policy: str, judge: Callable[[Mapping[str, Any]], Any]) -> None:
        """Take the numbers of several firings, which hold values, of which `judge` makes records when they are read."""
        self._may_fail |= policy == "error"
        self._wait({"numbers": numbers, "judge": judge})

    def _wait(self, record: dict[str, Any] | Waiting) -> None:
        self._pending.append(record)
        if len(self._pending) > MOST_PENDING:
            self.settle()

    def _taken(self, start: tuple[Any, ...], data: Mapping[str, Any], *, show: bool) -> dict[str, Any] | None:
        """The record, printed if it is to be shown; None if the model is being traced."""
        record = _readable({**dict(zip(RECORD_KEYS, start, strict=True)), **data})
        if record is None:
            return None
        if "bit" in record:
            self._count_fault(record)
        if record.get("policy") == "error" and "last_good" not in record:
            self._may_fail = True
        if show:
            record = read(record)
            self.show(line(record))
        return record

    def _count_fault(self, record: dict[str, Any]) -> None:
        self._faults[record["hook"]] += 1
        if self._faults[record["hook"]] > MOST_FAULTS:
            raise HookError(
                f"{_place(record)}: the list of its faults is full: a hook may make {MOST_FAULTS:,} in a run; give a "
                "smaller rate or count, select less, or use `when`"
            )

    def settle(self) -> None:
        """Read the tensors of the pending records and store them; checks that passed are not stored.

        Raises HookError for a record that cannot be read; the records after it stay pending.
        """
        pending = self._pending[:]
        del self._pending[: len(pending)]  # the list itself must stay: hooks append to it
        self._statistics.measure()
        _read_tensors([record for record in pending if isinstance(record, dict)])
        store = self.store
        for number, record in enumerate(pending):
            try:
                if isinstance(record, list):
                    store(record[0])
                    continue
                for judged in record["judge"](record) if "judge" in record else (record,):
                    self._settle(judged)
            except BaseException:
                self._pending[:0] = pending[number + 1 :]
                raise

    def _settle(self, record: dict[str, Any]) -> None:
        where = record.pop("where", None)
        has_raised = "last_good" in record  # noted then, maybe in an earlier pass
        if "ok" in record:
            if not has_raised:
                record["last_good"] = self.last_good.before(record)
            if record["ok"]:
                return
        try:
            plain = read(record)
        except RuntimeError as error:  # for a kind of tensor that torch cannot convert
            raise HookError(f"{_place(record)}: what it recorded cannot be read: {reason(error)}") from error
        self.store(plain)
        policy = plain.get("policy")
        if policy == "stop" and self.stop is None:
            self.stop = f"{_place(plain)}: {verdict(plain)}"
        if policy == "error" and not has_raised and self._failed is None:
            place = _place(plain) if where is None else f"{where} ({plain['class']})"
            at = f" at {plain['path']}" if plain["path"] else ""
            self._failed = f"{place}{at}, epoch {plain['epoch']}, step {plain['step']}: {verdict(plain)}"

    def raise_failed(self) -> None:
        """Raise CheckFailed if a check failed that is judged at the end of the step, and whose policy is `error`."""
        if self._may_fail:
            self._may_fail = False
            self.settle()
        if self._failed is not None:
            failed = self._failed
            self._failed = None
            raise CheckFailed(failed)

    def state_dict(self) -> dict[str, Any]:
        """The stop message, the budgets and the numbers of faults. Pending records are read and stored first."""
        self.settle()
        budgets = {
            hook: {"used": budget.used, "spent": budget.spent} for hook, budget in self._budgets.items()
        }
        return {"stop": self.stop, "budgets": budgets, "faults": dict(self._faults)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`. Records that are pending from installing the hooks again are dropped."""
        self._pending.clear()
        self.stop = state["stop"]
        self._faults = Counter(state.get("faults", {}))  # states of earlier versions lack it
        for hook, before in state["budgets"].items():
            if (budget := self._budgets.get(hook)) is not None:
                budget.used = before["used"]
                budget.spent = before["spent"]

    def show(self, text: str) -> None:
        """Print the line of a `print` action."""
        print(text)

    @abstractmethod
    def store(self, record: dict[str, Any]) -> None:
        """Keep a record that has been read."""


class Memory(RecordSink):
    """Keeps captures and records for as long as the installation is referred to."""

    counts_calls = True

    def __init__(self) -> None:
        super().__init__()
        self.captures = dict[str, dict[str, list[Any]]]()
        self._records = list[dict[str, Any]]()

    def keeper(self, site: HookSite) -> Keeper:
        """A function that appends to the live list of the site's module."""
        of_hook = self.captures.setdefault(site.hook_name, {})
        if site.spec.keys.tokens is not None or site.spec.chooses_samples:
            return self.within_budget(site, self._keeper_of_rows(site, of_hook))
        return self.within_budget(site, KeptInMemory(of_hook.setdefault(site.path, []), append_copy))

    def _keeper_of_rows(self, site: HookSite, of_hook: dict[str, list[Any]]) -> Keeper:
        """A function that appends rows chosen by `tokens` or by sample, with the tokens and samples they belong to."""
        entries = of_hook[site.path] = CapturedRows(find_decoder=partial(decoder_of, site.tokenizer))

        def keep(value: Any, rows: Tensor | None = None, tokens: TokenRows | None = None) -> None:
            if (value := in_reach(value)) is TRACED:
                return
            if tokens is None and rows is not None:
                samples = site.clock.samples
                unknown = torch.full_like(rows, -1)
                tokens = TokenRows(rows, rows if samples is None else samples[rows], unknown, unknown)
            if tokens is not None:
                with torch._C._DisableFuncTorch():
                    entries.append(snapshot(value))
                    entries.note(tokens)

        return keep

    def size(self, value: Any) -> int:
        """The bytes that a copy of the value holds; a tensor that occurs twice counts once."""
        return sum(held_bytes(tensor) for tensor in {id(tensor): tensor for tensor in held(value)}.values())

    def store(self, record: dict[str, Any]) -> None:
        """Append a record whose tensors have been read."""
        self._records.append(record)

    @property
    def records(self) -> list[dict[str, Any]]:
        """All records so far, in order, with their tensors read."""
        self.settle()
        return self._records


MOST_PENDING = 4096
"""More pending records than this are read at once, so that a long loop does not hold all their tensors."""


def _readable(record: dict[str, Any]) -> dict[str, Any] | None:
    """The record with its tensors unwrapped; None if the model is being traced. Raises HookError for a meta tensor."""
    for key, value in record.items():
        if isinstance(value, Tensor) and (plain := readable(value)) is not value:
            if plain is None and value.is_meta:
                raise HookError(f"{_place(record)}: a meta tensor has no values to record")
            if plain is None:
                return None
            record = record | {key: plain}
    return record


def _read_tensors(records: Iterable[dict[str, Any]]) -> None:
    """Replace the tensors that records hold on a device by copies; the host waits once."""
    places = [
        (record, key)
        for record in records
        for key, value in record.items()
        if isinstance(value, Tensor) and not value.is_cpu
    ]
    copies = read_together(record[key] for record, key in places)
    for (record, key), copy in zip(places, copies, strict=True):
        record[key] = copy


def read(record: dict[str, Any]) -> dict[str, Any]:
    """The record with its tensors as Python numbers and lists, or in the forms that go with them."""
    plain: dict[str, Any] = {
        key: value.tolist() if isinstance(value, Tensor) else value for key, value in record.items()
    }
    for key, form in plain.pop(FORMS, {}).items():
        plain[key] = form(plain[key])
    return plain


def _place(record: dict[str, Any]) -> str:
    cls = f" ({record['class']})" if record.get("class") else ""
    return f"hook {record['hook']!r} on {record['module'] or '(root)'}{cls}"


def line(record: dict[str, Any]) -> str:
    """A record as one line of text: ``shapes  layer4  shape=[10, 512, 1, 1]``."""
    at = f" {record['path']}" if record["path"] else ""
    data = "  ".join(
        f"{key}={value:.6g}" if isinstance(value, float) else f"{key}={value}"
        for key, value in record.items()
        if key not in ABOUT
    )
    return printable(f"{record['hook']}  {record['module'] or '(root)'}{at}  {data}", kept="\n\t")


# ---- captures of hooks with `tokens` ---------------------------------------------------------------------------


Decode = Callable[[int], str]
"""Token id -> its text."""


class CapturedRows(list[Any]):
    """A list with an entry for each firing; its properties describe the rows of all entries, concatenated."""

    def __init__(
        self,
        values: Iterable[Any] = (),
        rows: Iterable[TokenRows] = (),
        find_decoder: Callable[[], Decode | None] = lambda: None,
    ) -> None:
        super().__init__(values)
        self._rows = list(rows)
        self._find_decoder = find_decoder

    def __reduce__(self) -> tuple[Any, ...]:
        texts = dict(zip(self.token_ids.tolist(), self.text, strict=True))
        return _restored, (list(self), self._rows, texts)

    def note(self, rows: TokenRows) -> None:
        """Add the samples and tokens of the rows of the entry that was appended last."""
        self._rows.append(rows)

    @property
    def sample_ids(self) -> Tensor:
        """[rows] int64: the sample number of each row; without `hooks.samples` counted from 0 in the order of calls.

        Without `tokens` and without `hooks.samples` it is the place in the batch.
        """
        return _joined([rows.numbers for rows in self._rows])

    @property
    def positions(self) -> Tensor:
        """[rows] int64: the position, counted from the first real token; for attention patterns that of the query."""
        return _joined([rows.positions for rows in self._rows])

    @property
    def keys(self) -> Tensor:
        """[rows] int64: the position of the key if `tokens` selects queries and keys; else -1."""
        return _joined(
            [torch.full_like(rows.samples, -1) if rows.keys is None else rows.keys for rows in self._rows]
        )

    @property
    def token_ids(self) -> Tensor:
        """[rows] int64: the token id at the position; -1 if it is not known."""
        return _joined([rows.token_ids for rows in self._rows])

    @property
    def text(self) -> list[str]:
        """The text of each row's token; ``""`` if the model's tokenizer is not known."""
        decode = self._find_decoder()
        return ["" if decode is None or token < 0 else decode(token) for token in self.token_ids.tolist()]


def _restored(values: list[Any], rows: list[TokenRows], texts: dict[int, str]) -> CapturedRows:
    """The unpickled list; it has the texts of its own tokens instead of a tokenizer."""
    return CapturedRows(values, rows, lambda: texts.__getitem__)


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
