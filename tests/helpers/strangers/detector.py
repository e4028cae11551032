"""A detector with two feature maps and a list of boxes for each picture."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def block(inside: int, outside: int) -> nn.Sequential:
    """Halve the picture."""
    return nn.Sequential(nn.Conv2d(inside, outside, 3, stride=2, padding=1), nn.ReLU(inplace=True))


class Detector(nn.Module):
    """Pictures [B, 3, H, W] -> a dict: `maps`, a dict of feature maps; `boxes`, for each picture [k, 4]; `scores`."""

    def __init__(self, width: int = 6, most: int = 3) -> None:
        super().__init__()
        self.most = most
        self.stem = block(3, width)
        self.fine = block(width, width)
        self.coarse = block(width, width)
        self.lateral = nn.ModuleDict({name: nn.Conv2d(width, width, 1) for name in ("fine", "coarse")})
        self.score = nn.Conv2d(width, 1, 1)
        self.box = nn.Conv2d(width, 4, 1)

    def forward(self, pictures: Tensor) -> dict[str, Any]:
        """The maps are at a quarter and an eighth of the picture's size; boxes are in 0..1, the best first."""
        fine = self.fine(self.stem(pictures))
        maps = {"fine": self.lateral["fine"](fine), "coarse": self.lateral["coarse"](self.coarse(fine))}
        scores = torch.cat([self.score(each).flatten(1) for each in maps.values()], dim=1)
        boxes = torch.cat([self.box(each).flatten(2) for each in maps.values()], dim=2).sigmoid()
        best = scores.topk(self.most, dim=1).indices
        chosen = [each[:, places].T for each, places in zip(boxes, best, strict=True)]
        return {"maps": maps, "boxes": chosen, "scores": scores}


class Squares(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Grey pictures with one bright square each; the target is its box: x, y, width and height in 0..1.

    most: pictures have 1 to so many squares, and their targets are [n, 4]; 1: the target is [4]
    """

    def __init__(self, count: int, seed: int, size: int = 16, most: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.pictures, self.boxes = [], []
        for number in range(count):
            picture = 0.1 * torch.rand(3, size, size, generator=generator)
            boxes = []
            for _ in range(1 + number % most):
                left, top = torch.randint(0, size - 4, (2,), generator=generator).tolist()
                picture[:, top : top + 4, left : left + 4] += 0.8
                boxes.append([left / size, top / size, 4 / size, 4 / size])
            self.pictures.append(picture)
            self.boxes.append(torch.tensor(boxes) if most > 1 else torch.tensor(boxes[0]))

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.pictures[index], self.boxes[index]


def build(width: int = 6) -> nn.Module:
    """The model."""
    return Detector(width)


def data(split: str, count: int = 16, most: int = 1) -> Squares:
    """The pictures of a split."""
    return Squares(count if split == "train" else 6, seed=1 if split == "train" else 2, most=most)


def collate(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, list[Tensor]]:
    """Pictures [B, 3, H, W] and a list of boxes [n, 4]."""
    pictures, boxes = zip(*samples, strict=True)
    return torch.stack(pictures), list(boxes)


def loss(output: dict[str, Any], target: Any) -> Tensor:
    """The mean distance of the best box of each picture to its (first) square."""
    best = torch.stack([boxes[0] for boxes in output["boxes"]])
    wanted = target if isinstance(target, Tensor) else torch.stack([boxes[0] for boxes in target])
    return F.l1_loss(best, wanted)


def overlap(output: dict[str, Any], target: Any) -> Tensor:
    """The mean intersection over union of the best box with the (first) square."""
    best = torch.stack([boxes[0] for boxes in output["boxes"]])
    wanted = target if isinstance(target, Tensor) else torch.stack([boxes[0] for boxes in target])
    low = torch.maximum(best[:, :2], wanted[:, :2])
    high = torch.minimum(best[:, :2] + best[:, 2:], wanted[:, :2] + wanted[:, 2:])
    common = (high - low).clamp_min(0).prod(1)
    both = best[:, 2:].prod(1) + wanted[:, 2:].prod(1) - common
    return (common / both).mean()
