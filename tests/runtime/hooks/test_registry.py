"""Every hook type is one record and one class that is registered for it."""

from __future__ import annotations

from collections import Counter

from hookrun.discovery import own_subclasses
from hookrun.hook_types import HOOK_TYPES
from hookrun.runtime import hooks
from hookrun.runtime.hooks.base import ModuleHook, ParameterHook, RegisteredHook, registered_hooks


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
