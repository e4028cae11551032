"""Embeddings of tokens and positions that are too small for the data are reported."""

from __future__ import annotations

from types import SimpleNamespace

from torch import nn

from hookrun.models.token_fit import positions_of, unfit_tokens


class Net(nn.Module):
    def __init__(self, positions: int, **config: int) -> None:
        super().__init__()
        self.h = nn.ModuleDict({"wpe": nn.Embedding(positions, 2), "wte": nn.Embedding(3, 2)})
        self.config = SimpleNamespace(**config)


def test_too_few_tokens_or_positions_are_reported_with_the_module() -> None:
    model = Net(8, vocab_size=10)
    assert unfit_tokens(model, 10, 8) == []
    texts = [problem.what for problem in unfit_tokens(model, 11, 9)]
    assert texts == [
        "the model has 10 tokens, and the data has 11",
        "the model has 8 positions (h.wpe), and samples of the data 9 tokens",
    ]


def test_data_without_tokens_and_models_without_a_configuration_are_not_checked() -> None:
    assert unfit_tokens(Net(8, vocab_size=10), None, 100) == unfit_tokens(nn.Embedding(3, 2), 100, 100) == []


def test_the_smallest_number_of_positions_counts() -> None:
    assert positions_of(Net(8, max_position_embeddings=6)) == (6, "max_position_embeddings")
    assert positions_of(Net(8, max_position_embeddings=16)) == (8, "h.wpe")
    assert positions_of(nn.Linear(2, 2)) is None
