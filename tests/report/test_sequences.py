"""The token sequences that went through the model."""

from __future__ import annotations

from hookrun.report.sequences import Sequence


def test_padding_is_cut_off_and_unknown_tokens_are_numbers() -> None:
    found = Sequence.of({"tokens": [5, 6], "padding": [3, 1], "targets": [6, None]}, {5: "a"})
    assert (found.before, found.width, found.targets, found.names) == (3, 6, (6, None), ["a", "#6"])


def test_targets_of_another_length_are_left_out() -> None:
    assert Sequence.of({"tokens": [5, 6], "targets": [6]}, {}).targets == (None, None)
    assert Sequence.of({"tokens": [5, 6]}, {}).width == 2
