"""The gradient of a returned argument or view is that of its uses after the module only."""

from __future__ import annotations

import torch
from torch import nn

from hookrun.runtime.hooks.exits import Watched, takes_nodes


def test_only_uses_after_the_exit_go_through_the_hooks() -> None:
    for views in (None, []):
        x = torch.ones(2, requires_grad=True)
        y = x * 1
        new = Watched("here", [lambda grad: grad * 10]).attach(y, views)
        assert (new is y) is (views is None) and torch.equal(new, y)
        (new.sum() + (3 * y.sum() if views is not None else 0)).backward()
        assert x.grad is not None and x.grad.tolist() == [10 + 3 * (views is not None)] * 2, views


def test_leaves_and_parts_of_them_get_no_nodes() -> None:
    leaf = nn.Parameter(torch.ones(2))
    assert not takes_nodes(leaf) and not takes_nodes(leaf[:1]) and not takes_nodes(torch.ones(1))
    assert takes_nodes(leaf * 1) and takes_nodes((leaf * 1)[:1])
    assert not any(takes_nodes(each) for each in (leaf * 1).unbind())
