"""The next token is the most probable or a draw that depends on seed and number alone, until its sequence ends."""

from __future__ import annotations

import pytest
import torch
from draws import normal
from torch import Tensor

from hookrun.errors import HookrunError
from hookrun.spec.task import Sampling
from hookrun.tasks.generation.next_token import NextTokens, divergence, most_probable, restricted


def scores(*tokens: int) -> Tensor:
    """[B, 4], where each token is the most probable of its row."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), 4).float()


def test_a_sequence_ends_at_its_end_token_or_the_largest_number_and_is_padded_then() -> None:
    choosing = NextTokens(None, [0, 0], stop=(3,), most=3, pad=9)
    first = scores(1, 3)
    assert [choosing.choose(each).tolist() for each in (first, scores(2, 1), scores(1, 1))] == [
        [1, 3], [2, 9], [1, 9]
    ]  # fmt: skip
    assert choosing.is_over and [choosing.continuation(row).is_over for row in (0, 1)] == [False, True]
    assert choosing.choose(scores(1, 1)).tolist() == [9, 9], "one call more changes nothing"
    assert choosing.tokens == [[1, 2, 1], [3]]
    kept = first.clone()
    first.zero_()
    assert torch.equal(choosing.continuation(1).first, kept[1]), "of the first choice, a copy"


def test_a_prescribed_first_token_is_taken_whatever_the_scores() -> None:
    choosing = NextTokens(Sampling(), [0, 1], stop=(), most=2, begins=2)
    assert choosing.choose(scores(1, 3) * 50).tolist() == [2, 2]
    assert choosing.choose(scores(1, 3) * 50).tolist() == [1, 3]


def test_scores_without_a_finite_one_are_refused_for_open_sequences_alone() -> None:
    choosing = NextTokens(None, [0, 0], stop=(3,), most=3)
    choosing.choose(scores(1, 3))
    wrong = scores(1, 1)
    wrong[1] = torch.nan
    assert choosing.choose(wrong).tolist() == [1, 0]
    for value in (torch.nan, torch.inf, -torch.inf):
        wrong[0] = value
        with pytest.raises(
            HookrunError, match="sequence 0 of the batch has no finite score for its new token 2"
        ):
            choosing.choose(wrong)


def test_a_draw_is_that_of_the_sequence_alone_and_takes_none_from_the_process() -> None:
    many, before = normal(5, 30), torch.get_rng_state()
    whole = NextTokens(Sampling(), range(5), stop=(), most=4)
    alone = [NextTokens(Sampling(), [seed], stop=(), most=4) for seed in range(5)]
    for _ in range(4):
        whole.choose(many)
        for row, each in enumerate(alone):
            each.choose(many[row : row + 1])
    assert whole.tokens == [each.tokens[0] for each in alone]
    assert len({tuple(tokens) for tokens in whole.tokens}) == 5
    assert any(len(set(tokens)) > 1 for tokens in whole.tokens), "another draw for each new token"
    assert torch.equal(torch.get_rng_state(), before)


def test_draws_follow_the_distribution_and_its_restrictions() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -torch.inf]).repeat(3000, 1)
    for sampling, expected in (
        (Sampling(), logits[0].softmax(-1)),
        (Sampling(temperature=0.5), (2 * logits[0]).softmax(-1)),
        (Sampling(top_k=2), torch.tensor([2.0, 1.0, *[-torch.inf] * 3]).softmax(-1)),
        (Sampling(top_p=0.7), torch.tensor([2.0, 1.0, *[-torch.inf] * 3]).softmax(-1)),  # 0.64 + 0.24
        (Sampling(top_p=0.1), torch.tensor([1.0, 0, 0, 0, 0])),
        (Sampling(top_k=9, top_p=1.0), logits[0].softmax(-1)),
    ):
        assert torch.allclose(restricted(logits[:1], sampling)[0].softmax(-1), expected), sampling
        choosing = NextTokens(sampling, range(3000), stop=(), most=1)
        counts = torch.bincount(choosing.choose(logits), minlength=5) / 3000
        assert torch.allclose(counts, expected, atol=0.035), sampling
        assert not counts[expected == 0].any(), sampling


def test_probabilities_and_kl_are_of_float64_and_in_nats() -> None:
    p, q = torch.tensor([0.0, 1.0, -torch.inf]), torch.tensor([1.0, 0.0, 3.0])
    first, second = most_probable(p, 2)
    assert first == (1, pytest.approx(float(p.double().softmax(-1)[1]), abs=1e-15)) and second[0] == 0
    assert len(most_probable(p, 9)) == 3
    log_p, log_q = p[:2].log_softmax(-1), q.log_softmax(-1)[:2]
    assert divergence(p, q) == pytest.approx(float((log_p.exp() * (log_p - log_q)).sum()))
    assert divergence(p, p) == 0.0 and divergence(q, p) == float("inf")
    assert min(divergence(near, near + 1e-9) for near in normal(200, 40) * 5) >= 0
