"""An unsharded model has no sharded modules, and its hooks are not moved."""

from __future__ import annotations

from torch import nn

import hookrun
from hookrun.runtime.sharded_models import is_fully_sharded, move_inside_sharding, reduces, sharded_modules


def test_an_unsharded_model_is_not_changed() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    spec = {"h": {"select": "0", "hook": "forward", "action": "scale", "factor": 2.0}}
    with hookrun.hooked(model, spec):
        numbers = list(model[0]._forward_hooks)
        move_inside_sharding(model, numbers)
        assert list(model[0]._forward_hooks) == numbers
    assert not list(sharded_modules(model)) and not is_fully_sharded(model) and reduces(model)
