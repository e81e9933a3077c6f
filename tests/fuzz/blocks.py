"""Blocks that stacks are made of. Their source is copied into what is written: each stands alone.

A block takes and gives x, (B, S, M). `keep`, bool and (B, 1, 1, S) or (B, 1, S, S), is true where a
query may look; `memory`, (B, T, M), with `seen`, (B, 1, 1, T), is the other input.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def heads(x: Tensor, h: int) -> Tensor:
    return x.unflatten(-1, (h, -1)).transpose(1, 2)


def softmax(scores: Tensor, keep: Tensor, spelling: str, fill: str, guard: str) -> Tensor:
    """Weights over the last axis of scores, (B, H, S, T), of which some are hidden."""
    value = {
        "-inf": float("-inf"),
        "-1e9": -1e9,
        "lowest": torch.finfo(scores.dtype).min,
        "-1e4": -1e4,
    }[fill]
    if guard == "first key":
        keep = keep | (torch.arange(keep.shape[-1]) == 0)
    elif guard == "any":
        keep = keep | ~keep.any(-1, keepdim=True)
    if guard == "additive":
        scores = scores + torch.zeros_like(scores).masked_fill(~keep, value)
    elif guard == "times":
        scores = scores + (1.0 - keep.to(scores.dtype)) * max(value, -1e9)
    else:
        scores = torch.where(keep, scores, value)
    if spelling == "max":
        e = (scores - scores.amax(-1, keepdim=True)).exp()
        w = e / e.sum(-1, keepdim=True)
    elif spelling == "masked exp":
        e = (scores - scores.amax(-1, keepdim=True).clamp(min=-1e4)).exp() * keep
        w = e / e.sum(-1, keepdim=True).clamp(min=1e-6)
    elif spelling == "log":
        w = scores.log_softmax(-1).exp()
    else:
        w = scores.softmax(-1)
    if guard == "nan to num":
        w = torch.nan_to_num(w)
    elif guard == "zero":
        w = w.masked_fill(~keep, 0.0)
    elif guard == "where any":
        w = torch.where(keep.any(-1, keepdim=True), w, 0.0)
    return w


class Attention(nn.Module):
    def __init__(self, m, spelling, fill, guard):
        super().__init__()
        self.qkv, self.out = nn.Linear(m, 3 * m), nn.Linear(m, m)
        self.how = spelling, fill, guard

    def forward(self, x, keep, memory, seen):
        q, k, v = (heads(part, 2) for part in self.qkv(x).chunk(3, -1))
        w = softmax(q @ k.mT / k.shape[-1] ** 0.5, keep, *self.how)
        return self.out((w @ v).transpose(1, 2).flatten(2))


class SDPA(nn.Module):
    def __init__(self, m):
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(m, m), nn.Linear(m, m), nn.Linear(m, m)

    def forward(self, x, keep, memory, seen):
        k, v = (heads(part, 1) for part in self.kv(x).chunk(2, -1))
        o = F.scaled_dot_product_attention(heads(self.q(x), 2), k, v, keep, enable_gqa=True)
        return self.out(o.transpose(1, 2).flatten(2))


class Cross(nn.Module):
    def __init__(self, m, spelling, fill, guard):
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(m, m), nn.Linear(m, 2 * m), nn.Linear(m, m)
        self.how = spelling, fill, guard

    def forward(self, x, keep, memory, seen):
        q, (k, v) = heads(self.q(x), 2), (heads(part, 2) for part in self.kv(memory).chunk(2, -1))
        w = softmax(q @ k.mT * 0.4, seen, *self.how)
        return self.out((w @ v).transpose(1, 2).flatten(2))


class Torch(nn.Module):
    def __init__(self, m):
        super().__init__()
        self.attention = nn.MultiheadAttention(m, 2, batch_first=True)

    def forward(self, x, keep, memory, seen):
        return self.attention(x, memory, memory, key_padding_mask=~seen[:, 0, 0])[0]


class Window(nn.Module):
    """Attention within windows of four tokens, of a sequence that is filled up to whole ones."""

    def __init__(self, m, spelling, fill, guard):
        super().__init__()
        self.qkv, self.out = nn.Linear(m, 3 * m), nn.Linear(m, m)
        self.how = spelling, fill, guard

    def forward(self, x, keep, memory, seen):
        s = x.shape[1]
        more = (4 - s % 4) % 4
        x = F.pad(x, (0, 0, 0, more)).unflatten(1, (-1, 4))
        there = (torch.arange(s + more) < s).unflatten(0, (-1, 4))[:, None, None]
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(2, 3) for part in self.qkv(x).chunk(3, -1))
        w = softmax(q @ k.mT * 0.4, there, *self.how)
        o = self.out((w @ v).transpose(2, 3).flatten(3))
        return o.flatten(1, 2)[:, :s]


class Latents(nn.Module):
    """Three latents look at the tokens, and the tokens at them (Jaegle et al., 2021)."""

    def __init__(self, m, spelling, fill, guard):
        super().__init__()
        self.latents = nn.Parameter(torch.empty(3, m))
        self.q, self.kv = nn.Linear(m, m), nn.Linear(m, 2 * m)
        self.how = spelling, fill, guard

    def forward(self, x, keep, memory, seen):
        k, v = self.kv(x).chunk(2, -1)
        q = self.q(self.latents).expand(x.shape[0], -1, -1)
        hidden = keep[:, 0].any(1, keepdim=True)
        found = softmax(q @ k.mT * 0.4, hidden, *self.how) @ v
        return (self.q(x) @ found.mT * 0.4).softmax(-1) @ found


class Linear(nn.Module):
    """Katharopoulos et al. (2020), over all keys that some query sees."""

    def __init__(self, m):
        super().__init__()
        self.qkv = nn.Linear(m, 3 * m)

    def forward(self, x, keep, memory, seen):
        q, k, v = (heads(part, 2) for part in self.qkv(x).chunk(3, -1))
        k = (F.elu(k) + 1) * keep.any(-2)[..., None]
        q = F.elu(q) + 1
        o = (q @ (k.mT @ v)) / ((q * k.sum(-2, keepdim=True)).sum(-1, keepdim=True) + 1e-3)
        return o.transpose(1, 2).flatten(2)


class CausalLinear(nn.Module):
    def __init__(self, m):
        super().__init__()
        self.qkv = nn.Linear(m, 3 * m)

    def forward(self, x, keep, memory, seen):
        q, k, v = self.qkv(x).chunk(3, -1)
        states = (F.relu(k)[..., :, None] * v[..., None, :]).cumsum(1)
        return (F.relu(q)[..., None, :] @ states)[..., 0, :] / x.shape[1]


class Decay(nn.Module):
    """Retention in its parallel form (Sun et al., 2023)."""

    def __init__(self, m):
        super().__init__()
        self.qkv = nn.Linear(m, 3 * m)

    def forward(self, x, keep, memory, seen):
        q, k, v = (heads(part, 2) for part in self.qkv(x).chunk(3, -1))
        place = torch.arange(x.shape[1])
        apart = place[:, None] - place
        decay = torch.where(apart >= 0, 0.8 ** apart.clamp(min=0), 0.0)
        return ((q @ k.mT * 0.3 * decay) @ v).transpose(1, 2).flatten(2)


class Recurrent(nn.Module):
    def __init__(self, m, cell):
        super().__init__()
        made = {"gru": nn.GRU, "lstm": nn.LSTM, "rnn": nn.RNN, "both ways": nn.GRU}[cell]
        both = cell == "both ways"
        self.cells = made(m, m // (1 + both), batch_first=True, bidirectional=both)

    def forward(self, x, keep, memory, seen):
        return self.cells(x)[0]


class Loop(nn.Module):
    """A cell, token after token."""

    def __init__(self, m):
        super().__init__()
        self.a, self.b = nn.Linear(m, m), nn.Linear(m, m)

    def forward(self, x, keep, memory, seen):
        h = torch.zeros_like(x[:, 0])
        states = []
        for t in range(x.shape[1]):
            h = torch.tanh(self.a(x[:, t]) + self.b(h)) * 0.7 + 0.3 * h
            states.append(h)
        return torch.stack(states, 1)


class MLP(nn.Module):
    def __init__(self, m, act):
        super().__init__()
        self.up, self.down, self.act = nn.Linear(m, 2 * m), nn.Linear(2 * m, m), act

    def forward(self, x, keep, memory, seen):
        acts = {"gelu": F.gelu, "tanh gelu": lambda x: F.gelu(x, approximate="tanh")}
        acts |= {"relu": F.relu, "silu": F.silu, "quick": lambda x: x * torch.sigmoid(1.702 * x)}
        return self.down(acts[self.act](self.up(x)))


class Gated(nn.Module):
    def __init__(self, m):
        super().__init__()
        self.up, self.down = nn.Linear(m, 4 * m, bias=False), nn.Linear(2 * m, m, bias=False)

    def forward(self, x, keep, memory, seen):
        one, two = self.up(x).chunk(2, -1)
        return self.down(F.silu(one) * two)


class Experts(nn.Module):
    """The two best of three MLPs, for each token."""

    def __init__(self, m):
        super().__init__()
        self.gate = nn.Linear(m, 3)
        self.experts = nn.ModuleList(nn.Linear(m, m) for _ in range(3))

    def forward(self, x, keep, memory, seen):
        gates = self.gate(x)
        top, which = gates.topk(2, -1)
        shares = torch.zeros_like(gates).scatter(-1, which, top.softmax(-1))  # no attention
        return sum(one(x) * shares[..., i : i + 1] for i, one in enumerate(self.experts))


class Norm(nn.Module):
    def __init__(self, m, kind):
        super().__init__()
        self.gain, self.kind = nn.Parameter(torch.empty(m)), kind
        made = {"batch": nn.BatchNorm1d(m), "group": nn.GroupNorm(2, m)}
        self.norm = made.get(kind, nn.LayerNorm(m))

    def forward(self, x, keep, memory, seen):
        if self.kind == "rms":
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.gain
        if self.kind == "by hand":
            centred = x - x.mean(-1, keepdim=True)
            return centred / (centred.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
        return self.norm(x.mT).mT if self.kind in ("batch", "group") else self.norm(x)


class Convolution(nn.Module):
    def __init__(self, m, kind):
        super().__init__()
        groups = m if "depthwise" in kind else 1
        same = 0 if "causal" in kind else 1
        self.conv = nn.Conv1d(m, 2 * m if "glu" in kind else m, 3, padding=same, groups=groups)
        self.kind = kind

    def forward(self, x, keep, memory, seen):
        if "masked" in self.kind:
            x = x * keep.any(1).any(1)[..., None]
        x = F.pad(x.mT, (2, 0)) if "causal" in self.kind else x.mT
        x = self.conv(x)
        return (F.glu(x, 1) if "glu" in self.kind else x).mT


class Pool(nn.Module):
    def __init__(self, m, kind):
        super().__init__()
        self.mix, self.kind = nn.Linear(m, m), kind

    def forward(self, x, keep, memory, seen):
        valid = keep.any(1).any(1)[..., None].to(x.dtype)
        match self.kind:
            case "average":
                return F.avg_pool1d(x.mT, 3, 1, 1).mT
            case "max":
                return F.max_pool1d(x.mT, 3, 1, 1).mT
            case "masked mean":
                mean = (x * valid).sum(1, keepdim=True) / valid.sum(1, keepdim=True).clamp(min=1)
                return x + self.mix(mean)
            case "squeeze":
                return x * torch.sigmoid(self.mix(x.mean(1, keepdim=True)))
            case "masked max":
                return x + x.masked_fill(valid == 0, -1e9).amax(1, keepdim=True)
        return x - x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]


class Moved(nn.Module):
    def __init__(self, m, kind):
        super().__init__()
        self.mix, self.kind = nn.Linear(2 * m, m), kind

    def forward(self, x, keep, memory, seen):
        match self.kind:
            case "roll":
                other = torch.roll(x, 1, 1)
            case "shift":
                other = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
            case "flip":
                other = x.flip(1)
            case "fourier":
                other = torch.fft.fft(torch.fft.fft(x, dim=-1), dim=1).real / x.shape[1]
            case _:
                order = (torch.arange(x.shape[1]) * 0.7).sin().argsort()
                other = x[:, order]
        return self.mix(torch.cat([x, other], -1))


class Distances(nn.Module):
    """An embedding of how far tokens are apart weighs them."""

    def __init__(self, m):
        super().__init__()
        self.table, self.v = nn.Embedding(9, 2), nn.Linear(m, m)

    def forward(self, x, keep, memory, seen):
        place = torch.arange(x.shape[1])
        bias = self.table((place - place[:, None]).clamp(-4, 4) + 4).permute(2, 0, 1)
        w = bias.expand(x.shape[0], -1, -1, -1).softmax(-1)
        return (w @ heads(self.v(x), 2)).transpose(1, 2).flatten(2)
