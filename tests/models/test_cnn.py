"""The small convolutional network: the order of its modules, and its accuracy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from hookrun.models.cnn import CNN


def test_cnn_runs_its_modules_in_the_order_of_their_names_and_nothing_else() -> None:
    model = CNN(1, (8, 8), 10)
    ran: list[str] = []
    for name, module in model.named_children():
        module.register_forward_hook(lambda *_, name=name: ran.append(name))
    model(torch.rand(2, 1, 8, 8))
    assert ran == ["conv1", "relu1", "pool1", "conv2", "relu2", "pool2", "flatten", "fc"]
    assert ran == [name for name, _ in model.named_children()]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small batches are not worth sharing, and threads that wait for each other are slow on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_cnn_reads_97_of_100_digits_after_five_epochs() -> None:
    """Real images: 1,437 for training, 360 for validation."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    torch.manual_seed(0)
    train, val = torch.randperm(len(images)).split([1437, 360])
    model = CNN(1, (8, 8), 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(5):
        for batch in train[torch.randperm(len(train))].split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    with torch.no_grad():
        accuracy = (model(images[val]).argmax(1) == labels[val]).float().mean()
    assert accuracy >= 0.97
