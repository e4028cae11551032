"""A restart by torchrun: the run directory of an earlier process that the same torchrun has started."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from hookrun.store.format import STATUS

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

    run_dir: the directory that the command line names; it counts where torchrun says that this is a restart
    """
    store = _agent_store()
    if store is not None and store.check([_BEGUN]):
        name, process = json.loads(store.get(_BEGUN))
        if process == _PROCESS:
            return None
        run_dir = Path(name)
    elif os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return None
    return run_dir if (run_dir / STATUS).exists() else None


def _agent_store() -> Store | None:
    """The store of torchrun, which outlives the processes that it starts; None without torchrun."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    store, *_ = next(rendezvous("env://"))
    return store.underlying_store if isinstance(store, PrefixStore) else store
