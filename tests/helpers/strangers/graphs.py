"""A network on graphs: the nodes of all graphs of a batch stand in one table, without a dimension of the batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

Graph = dict[str, Tensor]


class Passing(nn.Module):
    """Adds the mean message of its neighbours to each node."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.message = nn.Linear(width, width)
        self.update = nn.Linear(width, width)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """[N, width] and [2, E] -> [N, width]."""
        source, target = edge_index
        sums = torch.zeros_like(x).index_add(0, target, self.message(x)[source])
        count = torch.zeros(len(x), 1).index_add(0, target, torch.ones(len(target), 1))
        new: Tensor = (self.update(x) + sums / count.clamp_min(1)).relu()
        return new


class GraphNet(nn.Module):
    """Classifies graphs whose nodes are concatenated."""

    def __init__(self, features: int = 4, width: int = 8, classes: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(features, width)
        self.layers = nn.ModuleList([Passing(width) for _ in range(2)])
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor, edge_index: Tensor, graph: Tensor) -> Tensor:
        """Nodes [N, F], edges [2, E] and the graph of each node [N] -> scores [G, classes]."""
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, edge_index)
        count = int(graph.max()) + 1
        sums = x.new_zeros(count, x.shape[1]).index_add(0, graph, x)
        sizes = torch.bincount(graph, minlength=count)[:, None]
        scores: Tensor = self.head(sums / sizes)
        return scores


class Shapes(torch.utils.data.Dataset[tuple[Graph, int]]):
    """Rings, paths and stars of 4 to 8 nodes."""

    num_classes = 3

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Graph, int]:
        generator = torch.Generator().manual_seed(1000 * self.seed + index)
        size = 4 + index % 5
        label = index % 3
        nodes = torch.arange(size)
        if label == 0:
            edges = torch.stack([nodes, nodes.roll(-1)])
        elif label == 1:
            edges = torch.stack([nodes[:-1], nodes[1:]])
        else:
            edges = torch.stack([torch.zeros_like(nodes[1:]), nodes[1:]])
        both = torch.cat([edges, edges.flip(0)], dim=1)
        return {"x": torch.randn(size, 4, generator=generator), "edge_index": both}, label


def build(width: int = 8) -> nn.Module:
    """The model."""
    return GraphNet(width=width)


def data(split: str, count: int = 18) -> Shapes:
    """The graphs of a split."""
    return Shapes(count if split == "train" else 9, seed=1 if split == "train" else 2)


def collate(samples: list[tuple[Graph, int]]) -> tuple[Graph, Tensor]:
    """The graphs as one table of nodes, and the labels [G]."""
    graphs, labels = zip(*samples, strict=True)
    sizes = torch.tensor([len(each["x"]) for each in graphs])
    starts = sizes.cumsum(0) - sizes
    edges = [each["edge_index"] + start for each, start in zip(graphs, starts, strict=True)]
    inputs = {
        "x": torch.cat([each["x"] for each in graphs]),
        "edge_index": torch.cat(edges, dim=1),
        "graph": torch.arange(len(graphs)).repeat_interleave(sizes),
    }
    return inputs, torch.tensor(labels)
