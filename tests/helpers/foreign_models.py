"""Models, data and losses that nobody here has chosen: the source of a module for tests of what fits what."""

SOURCE = '''
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass
class Out:
    hidden: torch.Tensor
    logits: torch.Tensor


FORMS = {
    "scores": lambda net, h: net.head(h),
    "pair": lambda net, h: (net.embedding(h), net.head(h)),
    "twice": lambda net, h: (net.head(h), -net.head(h)),
    "nested": lambda net, h: {"embedding": net.embedding(h), "heads": {"digit": net.head(h)}},
    "dataclass": lambda net, h: Out(h, net.head(h)),
    "embedding": lambda net, h: net.embedding(h),
    "one": lambda net, h: net.one(h),
    "labels": lambda net, h: net.head(h).argmax(1),
    "nothing": lambda net, h: None,
    "own_loss": lambda net, h: {"loss": net.one(h).square().mean(), "logits": net.head(h)},
    "softmax": lambda net, h: net.head(h).softmax(1),
    "sigmoid": lambda net, h: torch.sigmoid(net.head(h)).reshape(-1, 10),
    "aux_in_training": lambda net, h: (net.head(h), net.embedding(h)) if net.training else net.head(h),
}


class Form(nn.Module):
    """Images [B, 1, 8, 8] -> ten scores, an embedding of six numbers, one number, in one of the FORMS."""

    def __init__(self, form):
        super().__init__()
        self.form, self.body = form, nn.Linear(64, 16)
        self.head, self.embedding, self.one = nn.Linear(16, 10), nn.Linear(16, 6), nn.Linear(16, 1)

    def forward(self, x):
        return FORMS[self.form](self, self.body(x.flatten(1)).relu())


class Pixels(nn.Module):
    """Images -> `classes` numbers for each pixel, in a dict with a second head before them."""

    def __init__(self, classes, alone=True):
        super().__init__()
        self.alone = alone
        self.conv, self.aux = nn.Conv2d(1, classes, 3, padding=1), nn.Conv2d(1, classes, 1)

    def forward(self, x):
        return self.conv(x) if self.alone else {"aux": self.aux(x), "out": self.conv(x)}


class Words(nn.Module):
    """Tokens [B, T] -> scores [B, T, words], or time first, as log-probabilities [T, B, words]."""

    def __init__(self, words=12, time_first=False):
        super().__init__()
        self.time_first, self.embed, self.score = time_first, nn.Embedding(words, 8), nn.Linear(8, words)

    def forward(self, tokens):
        scores = self.score(self.embed(tokens))
        return scores.transpose(0, 1).log_softmax(-1) if self.time_first else scores


def targets(kind, images, draw):
    n = len(images)
    labels = torch.randint(0, 10, (n,), generator=draw)
    if kind in ("labels", "unknown"):
        return labels
    if kind == "beyond":
        return labels + 1
    if kind == "int32":
        return labels.int()
    if kind == "gaps":
        return labels.masked_fill(torch.arange(n) % 3 == 0, -100)
    if kind == "numbers":
        return torch.rand(n, generator=draw)
    if kind == "tags":
        return (torch.rand(n, 10, generator=draw) > 0.5).float()
    if kind == "same":
        return images
    if kind in ("maps", "maps255"):
        drawn = torch.randint(0, 3, (n, 8, 8), generator=draw)
        unknown = torch.rand(n, 8, 8, generator=draw) > 0.7
        return drawn.masked_fill(unknown, -100 if kind == "maps" else 255)
    raise ValueError(kind)


def data(split, kind, count=23, length=7, words=12):
    draw = torch.Generator().manual_seed(len(split))
    if kind in ("masked", "short"):
        x = torch.randint(0, words, (count, length), generator=draw)
        if kind == "short":
            return Pairs(x, torch.randint(1, words, (count, 3), generator=draw))
        hidden = torch.rand(count, length, generator=draw) > 0.3
        hidden[:, 0] = False
        return Pairs(x, x.masked_fill(hidden, -100))
    images = torch.rand(count, 1, 8, 8, generator=draw)
    pairs = Pairs(images, targets(kind, images, draw))
    if kind in ("labels", "gaps"):
        pairs.num_classes = 10
    return pairs


class Pairs:
    def __init__(self, inputs, targets):
        self.inputs, self.targets = inputs, targets

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, number):
        return self.inputs[number], self.targets[number]


def ctc(output, target):
    time, count, _ = output.shape
    lengths = torch.full((count,), time), torch.full((count,), target.shape[1])
    return F.ctc_loss(output, target, *lengths)


def wants_a_label(output, target):
    assert int(target.max()) > 0, "a batch without a label"
    return F.cross_entropy(output, target)


def wants_one_tensor(output, target):
    return F.cross_entropy(output.float(), target)


def of_several_classes(output, target):
    if len(set(target.tolist())) < 3:
        raise ValueError("a batch of fewer than three classes")
    return float((output.argmax(1).numpy() == target.numpy()).mean())


def detached(output, target):
    return F.cross_entropy(output.detach(), target)


def share(output, target):
    return (output.argmax(1) == target).float().mean()
'''
