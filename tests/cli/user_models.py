"""What a user's own file might hold: the tests copy it into a working directory of their own."""

import warnings

import torch
from torch import nn
from torch.export import Dim


class Attention(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)

    def forward(self, x):
        scores = self.query(x) @ self.key(x).transpose(-1, -2)
        return torch.sigmoid(torch.softmax(scores, dim=-1) @ x)


class Waves(nn.Module):
    """Attention over the sines of its scores, which nothing can fuse."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(16, 16)

    def forward(self, x):
        return torch.softmax(torch.sin(self.query(x) @ x.transpose(-1, -2)), dim=-1) @ x


class Bessel(nn.Module):
    def forward(self, x):
        return torch.special.bessel_j0(x)


class Branch(nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return x * 2
        return x.sum(0)


class Selection(nn.Module):
    def forward(self, x):
        chosen = x[x[:, 0] > 0]
        return chosen if chosen.shape[0] == 1 else x


class Number(nn.Module):
    def forward(self, x):
        return x[:, list(range(x.argmax().item()))]


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8)

    def forward(self, ids):
        return self.table(ids)


class Sum(nn.Module):
    def forward(self, *terms):
        return sum(terms[1:], terms[0])


class Late(nn.Module):
    """Normalises its attention after the values are summed."""

    def forward(self, x):
        weights = (x @ x.transpose(-1, -2) / 16).exp()
        return (weights @ x) / weights.sum(-1, keepdim=True)


class Pair(nn.Module):
    def forward(self, x):
        weights = torch.softmax(x @ x.transpose(-1, -2), dim=-1)
        return torch.tanh(x), weights @ x


class Two(nn.Module):
    """Takes what another model takes, at another width."""

    def forward(self, x, mask):
        return x * mask[..., None]


class Several(nn.Module):
    def forward(self, x, mask):
        return x * mask[..., None], mask


def _sample():
    return torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0))


def attention():
    torch.manual_seed(0)
    return Attention(), (_sample(),)


def noisy():
    print("building")
    warnings.warn("a warning of a library", stacklevel=1)
    return attention()


def dynamic():
    return *attention(), ({0: Dim("batch", max=64)},)


def alone():
    return attention()[0]


def wider():
    return Attention(32)


def waves():
    return nn.Sequential(Waves()), (_sample(),)


def late():
    return Late(), (_sample(),)


def pair():
    return Pair(), (_sample(),)


def two():
    return Two(), (_sample(), torch.ones(2, 8, dtype=torch.bool))


def several():
    return Several(), (torch.randn(2, 8, 32), torch.ones(2, 8, dtype=torch.bool))


def bessel():
    return nn.Sequential(nn.Identity(), Bessel()), (torch.randn(2, 8),)


def _falling():
    """Of a sum below 0, with the largest number in its first row."""
    return (torch.linspace(0.9, -1.1, 16).roll(3)).reshape(2, 8)


def branch():
    return Branch(), (_falling(),)


def selection():
    return Selection(), (_falling(),)


def number():
    return Number(), (_falling(),)


def lookup():
    return Lookup()


def variadic():
    return Sum()


def interrupted():
    raise KeyboardInterrupt
