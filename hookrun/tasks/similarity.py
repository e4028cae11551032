"""How alike two layers' representations of the same samples are."""

from __future__ import annotations

from torch import Tensor


def linear_cka(x: Tensor, y: Tensor) -> float:
    """Linear centered kernel alignment of [samples, a] and [samples, b], from 0 to 1.

    ||Yᵀ X||² / (||Xᵀ X|| ||Yᵀ Y||) with centered columns and Frobenius norms: the same for rotated and for scaled
    features. Kornblith, Norouzi, Lee, Hinton: Similarity of Neural Network Representations Revisited (2019).
    """
    x, y = _centered(x), _centered(y)
    if min(x.shape[1], y.shape[1]) > len(x):  # the same from the samples' inner products
        left, right = x @ x.T, y @ y.T
        return _ratio((left * right).sum(), left.norm() * right.norm())
    return _ratio((y.T @ x).square().sum(), (x.T @ x).norm() * (y.T @ y).norm())


def _centered(x: Tensor) -> Tensor:
    return x.double() - x.double().mean(0)


def _ratio(above: Tensor, below: Tensor) -> float:
    """0 for features that do not vary."""
    return float(above / below) if below > 0 else 0.0
