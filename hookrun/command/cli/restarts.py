"""A restart by torchrun: the run directory of an earlier process that the same torchrun has started."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from hookrun.store.files import StoreError
from hookrun.store.format import STATUS
from hookrun.store.records import Status, read_record

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_BEGUN = "hookrun/begun"
_PROCESS = uuid4().hex


def tell_begun(run_dir: Path) -> None:
    """Keep the path of the run directory for a process that torchrun starts in place of this one."""
    if (store := _agent_store()) is not None:
        store.set(_BEGUN, json.dumps([str(run_dir), _PROCESS]))


def begun_before(run_dir: Path) -> Path | None:
    """The directory with a run that torchrun has started before; None if this is the first start.

    A run that is done counts only where torchrun says that this is a restart: else the same processes run another one.

    run_dir: the directory that the command line names; it counts where torchrun says so
    """
    is_restart = (
        os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    )  # not told where another node failed
    store = _agent_store()
    if store is not None and store.check([_BEGUN]):
        name, process = json.loads(store.get(_BEGUN))
        if process == _PROCESS:
            return None
        run_dir = Path(name)
        is_restart = is_restart or not _is_done(run_dir)
    return run_dir if is_restart and (run_dir / STATUS).exists() else None


def _is_done(run_dir: Path) -> bool:
    with suppress(StoreError):  # there is no run, or it was cut off while it began
        return read_record(run_dir / STATUS, Status)["status"] == "done"
    return False


def _agent_store() -> Store | None:
    """The store of torchrun, which outlives the processes that it starts; None without torchrun."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    store, *_ = next(rendezvous("env://"))
    return store.underlying_store if isinstance(store, PrefixStore) else store
