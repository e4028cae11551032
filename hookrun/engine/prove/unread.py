"""Edits of a router's scores that nothing reads, since the router has chosen its experts already."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hookrun.engine.actions.base import Absent
from hookrun.engine.actions.experts import router_output
from hookrun.engine.hook_types import FORWARD
from hookrun.engine.runtime.site import HookSite
from hookrun.engine.spec.hook import HookSpec
from hookrun.engine.values import containers

_READ_NOTHING = {torch.ops.prim.device.default}
UNREAD = (
    "nothing reads the scores after the module, which has chosen its experts already: to take experts out, use action: "
    "drop_expert on the module that gets their indices and weights (in models of transformers `**.experts`)"
)


class ScoreReads(TorchDispatchMode):
    """Watches a run for operations that read the scores which routers have returned, before or behind an edit of them.

    Hooks of others, which may record the output of a router, get it before or after the edit.

    hooks:   the names of those that edit one tensor of an output, which may be the scores
    in_hook: a hook runs, whose operations do not count
    """

    def __init__(self, hooks: Iterable[HookSpec] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.hooks = set[str]()
        for hook in hooks:
            if hook.hook_type is FORWARD and hook.keys.target is not None and not hook.action.observes:
                self.hooks.add(hook.name)
        self.in_hook = False
        self._scores = list[tuple[str, str, ReferenceType[Tensor]]]()
        self._read = set[str]()

    def note(self, site: HookSite, value: Any, new: Any) -> None:
        """Note the scores in the output of a router, and what a hook that edits them has made of them."""
        keys = site.target_keys or ()
        with suppress(Absent):
            scores, _, _ = router_output(value, site.module)
            if scores is not None and containers.get(value, keys) is scores:
                edited = containers.get(new, keys)
                self._scores += [(site.hook_name, site.path, ref(tensor)) for tensor in (scores, edited)]

    def unread(self) -> list[tuple[str, str]]:
        """(hook, path) of each edit of scores that no operation has read, and that nothing holds after the run."""
        held = {path for _, path, scores in self._scores if scores() is not None}
        used = self._read | held
        return list(dict.fromkeys((hook, path) for hook, path, _ in self._scores if path not in used))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operation, and note the scores that it reads."""
        given = kwargs or {}
        if self._scores and not self.in_hook and func not in _READ_NOTHING:
            for tensor in containers.tensors((args, given)):
                self._read |= {path for _, path, scores in self._scores if scores() is tensor}
        return func(*args, **given)
