"""The part of a tensor that a hook's `heads`, `index` and `tokens` select together."""

from __future__ import annotations

from hookrun.plan.plan import PlannedHook
from hookrun.runtime.firing_state import TokensNow
from hookrun.runtime.heads import HeadsPart
from hookrun.runtime.part import Part, PartOfPart, TensorPart
from hookrun.runtime.tokens.choice import Rule
from hookrun.runtime.tokens.part import Indexed, TokensPart


def part_of(hook: PlannedHook, path: str, now: TokensNow) -> TensorPart | None:
    """The part at one module: `heads` first, then `index` within these, then `tokens`; None: the whole tensor."""
    keys, action = hook.spec.keys, hook.spec.action
    parts = list[TensorPart]()
    tokens = None
    if keys.tokens is not None:
        tokens = TokensPart(Rule(keys.tokens, action.observes, hook.texts), now)
    if keys.heads is not None:
        not_dim = tokens.dims[0] if tokens is not None else -1
        parts.append(HeadsPart(keys.heads, hook.heads[path], not_dim))
    if keys.index is not None:
        in_order = hook.spec.hook_type.batch and action.captures
        indexed = Part(keys.index, in_order=in_order)
        parts.append(indexed if tokens is None else Indexed(indexed, tokens))
    if tokens is not None:
        parts.append(tokens)
    whole: TensorPart | None = None
    for part in reversed(parts):
        whole = part if whole is None else PartOfPart(part, whole)
    return whole
