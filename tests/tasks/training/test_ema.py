"""The average of the weights equals that of torch.optim.swa_utils, and the model gets its own weights back."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hookrun.tasks.training.ema import WeightAverage


def test_the_average_is_torchs_and_the_weights_are_restored_after_an_error() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    average = WeightAverage(model, 0.9)
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    for _ in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
        model(torch.randn(5, 3))
        average.update()
        theirs.update_parameters(model)
    own = {name: each.clone() for name, each in model.state_dict().items()}
    with pytest.raises(ZeroDivisionError), average.swapped_in():
        for name, each in theirs.module.state_dict().items():
            if each.is_floating_point():
                torch.testing.assert_close(model.state_dict()[name], each)
                assert not torch.equal(each, own[name])
        with average.swapped_out():
            assert all(torch.equal(each, own[name]) for name, each in model.state_dict().items())
        raise ZeroDivisionError
    assert all(torch.equal(each, own[name]) for name, each in model.state_dict().items())
