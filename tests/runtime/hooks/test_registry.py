"""Every hook type is one record and one class that is registered for it."""

from __future__ import annotations

import copy
import pickle
from collections import Counter

from torch import nn

from hookrun.discovery import own_subclasses
from hookrun.hook_types import HOOK_TYPES
from hookrun.runtime import hooks
from hookrun.runtime.hooks.base import (
    ModuleHook,
    ParameterHook,
    RegisteredHook,
    Shared,
    registered_hooks,
)


def test_each_hook_type_has_one_class() -> None:
    assert set(registered_hooks()) == set(HOOK_TYPES.values())
    named = Counter(
        kind for item in own_subclasses(hooks, RegisteredHook) for kind in vars(item).get("hook_types", ())
    )
    assert {str(kind): count for kind, count in named.items() if count > 1} == {}


def test_the_class_registers_on_what_the_record_says() -> None:
    for kind, registered in registered_hooks().items():
        on_module = kind.on in ("module", "reading") and kind.phase != "installation"
        assert issubclass(registered, ModuleHook) == on_module, kind
        assert issubclass(registered, ParameterHook) == (kind.on == "parameter"), kind


def test_a_copy_of_a_registered_hook_runs_nothing() -> None:
    for registered in set(registered_hooks().values()):
        hook = registered((), Shared(nn.Identity()))
        hook.firings = [object()]
        for twin in (
            copy.deepcopy(hook),
            pickle.loads(pickle.dumps(hook)),
            pickle.loads(pickle.dumps(hook, 2)),
        ):
            assert type(twin) is registered and twin.firings == () and not vars(twin)
