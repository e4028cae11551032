"""How often each hook fired, and which hooks did nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hookrun.errors import listed
from hookrun.plan.plan import ResolvedPlan


def describe_inactive(inactive: Iterable[tuple[str, str, str]], shown: int = 4) -> list[str]:
    """One line for each hook that did nothing on some modules: the reasons, each with its modules.

    inactive: (hook name, module path, reason)
    shown:    how many modules are named for each reason
    """
    by_hook = dict[str, dict[str, list[str]]]()
    for hook, path, why in inactive:
        by_hook.setdefault(hook, {}).setdefault(why, []).append(path or "(root)")
    return [
        f"{hook} " + "; ".join(f"{why} on {listed(paths, shown)}" for why, paths in reasons.items())
        for hook, reasons in by_hook.items()
    ]


class Counts(dict[tuple[str, str], int]):
    """(hook name, module path) -> count; a shared module can be looked up by any of its names."""

    def __init__(self, plan: ResolvedPlan, counts: Mapping[tuple[str, str], int]) -> None:
        super().__init__(counts)
        self._aliases = {hook.spec.name: hook.aliases for hook in plan.hooks}

    def __missing__(self, key: tuple[str, str]) -> int:
        hook, path = key
        first = hook, self._aliases.get(hook, {}).get(path, path)
        if first not in self:
            raise KeyError(key)
        return self[first]
