"""Losses of a user's own, as the source of a module."""

SOURCE = """
import torch
from torch import nn
from torch.nn import functional as F

def mine(output, target, scale=1.0, weight=None):
    return F.cross_entropy(output, target, weight) * scale

class Smooth(nn.Module):
    def __init__(self, smoothing=0.1):
        super().__init__()
        self.smoothing = smoothing
        self.drawn = nn.Parameter(torch.rand(()))
    def forward(self, output, target):
        return F.cross_entropy(output, target, label_smoothing=self.smoothing)

def vector(output, target):
    return output

def breaks(output, target):
    return output.nothing
"""
