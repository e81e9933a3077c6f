"""What almost is an attention, or is one without a kernel: it must stay right, and say why."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.parity.formulations.kit import SELF, SIZES, K, Q, V, formulation

M = SIZES["m"]
SQUARE = "b h s d", "b h s d", "b h s e"


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT * 0.4


@formulation(*SQUARE, fused=0, declined=("linear", "linear"))
def linear_efficient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Efficient attention: q normalised over features, k over tokens, no q × k matrix."""
    return q.softmax(-1) @ (k.softmax(-2).mT @ v)


@formulation(*SQUARE, fused=0, declined=("linear-attention",))
def linear_elu(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Katharopoulos: elu + 1 feature maps, normalised by their sum; no softmax."""
    q, k = F.elu(q) + 1, F.elu(k) + 1
    context = q @ (k.mT @ v)
    return context / (q @ k.sum(-2)[..., None])


@formulation("b m s", fused=0, declined=("linear", "linear"))
def linear_double(x: Tensor) -> Tensor:
    """A²-Nets: gather by softmax over positions, distribute by softmax over channels."""
    gathered = x @ (0.5 * x).softmax(-1).mT
    return gathered @ (0.3 * x).softmax(1)


@formulation("b s m", "b t m", fused=0, declined=("additive",))
class AdditiveBahdanau(nn.Module):
    """vᵀ tanh(W q + U k)."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.u = nn.Linear(M, 7, bias=False), nn.Linear(M, 7, bias=False)
        self.v = nn.Linear(7, 1, bias=False)

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        hidden = torch.tanh(self.w(q)[:, :, None] + self.u(k)[:, None])
        return self.v(hidden).squeeze(-1).softmax(-1) @ k


@formulation("b m", "b t m", "b t:padding", fused=0, declined=("additive",))
class AdditiveDecoder(nn.Module):
    """The same for one decoder state, with padding."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.u = nn.Linear(M, 7), nn.Linear(M, 7)
        self.v = nn.Parameter(torch.zeros(7, 1))

    def forward(self, state: Tensor, memory: Tensor, padding: Tensor) -> Tensor:
        scores = torch.matmul(torch.tanh(self.w(state).unsqueeze(1) + self.u(memory)), self.v)
        scores = scores.squeeze(2).masked_fill(~padding, float("-inf"))
        return torch.bmm(F.softmax(scores, 1).unsqueeze(1), memory).squeeze(1)


@formulation("b s m", "b t m", fused=0, declined=("additive",))
class AdditiveConcatenated(nn.Module):
    """Luong's concat: vᵀ tanh(W [q; k])."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Linear(2 * M, 7), nn.Linear(7, 1, bias=False)

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        rows, columns = q.shape[1], k.shape[1]
        pairs = torch.cat(
            [q[:, :, None].expand(-1, -1, columns, -1), k[:, None].expand(-1, rows, -1, -1)], -1
        )
        return torch.matmul(self.v(torch.tanh(self.w(pairs))).squeeze(-1).softmax(-1), k)


@formulation("5 7", "7 4", "b s", fused=0, declined=("additive",))
def additive_graph(a: Tensor, w: Tensor, x: Tensor) -> Tensor:
    """GAT: leaky_relu(aᵢ + bⱼ) over an adjacency, values are node features."""
    h = a @ w
    scores = F.leaky_relu(h.sum(-1)[:, None] + (h * 0.5).sum(-1)[None], 0.2)
    scores = scores.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(2), -9e15)
    return x @ (scores.softmax(-1) @ h)


class _OfAllPairs(nn.Module):
    """GAT's scores, with each pair of nodes in a row of its own: the sources, and the targets."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.a = nn.Linear(M, 4), nn.Linear(8, 1, bias=False)

    def pairs(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h, nodes = self.w(x), x.shape[0]
        return h, h.repeat(nodes, 1), h.repeat_interleave(nodes, dim=0)


@formulation("s m", fused=0, declined=("additive",))
class AdditiveOfPairs(_OfAllPairs):
    """GAT: each row is projected, and is one of a table behind that."""

    def forward(self, x: Tensor) -> Tensor:
        h, sources, targets = self.pairs(x)
        scores = self.a(torch.cat([targets, sources], -1)).view(len(x), len(x))
        return F.leaky_relu(scores, 0.2).softmax(-1) @ h


@formulation("s m", fused=0, declined=("additive",))
class AdditiveOfRegroupedPairs(_OfAllPairs):
    """GATv2: the projection comes after the nonlinearity, and the table before it."""

    def forward(self, x: Tensor) -> Tensor:
        h, sources, targets = self.pairs(x)
        pairs = F.leaky_relu((sources + targets).view(len(x), len(x), -1), 0.2)
        return (pairs @ self.a.weight[0, :4]).softmax(-1) @ h


@formulation("b s m", "b 7 m", fused=0, declined=("logits-not-a-product",))
class RegroupedButNotAdded(nn.Module):
    """A nonlinearity of regrouped activations, for which no keys are added to queries."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(M, 7)

    def forward(self, x: Tensor, values: Tensor) -> Tensor:
        hidden = F.leaky_relu(self.w(x).reshape(-1, 7), 0.2)
        return hidden.unflatten(0, x.shape[:2]).softmax(-1) @ values


@formulation(*SQUARE, fused=0, declined=("",))
def softmax_over_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The wrong axis: S = T hides it."""
    return _scores(q, k).softmax(-2) @ v


@formulation(*SQUARE, fused=0, declined=("softmax-axis",))
def softmax_over_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax over heads."""
    return _scores(q, k).softmax(1) @ v


@formulation(*SQUARE, fused=0, declined=("softmax-axis",))
def softmax_over_both(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One distribution over all pairs of a head."""
    scores = _scores(q, k)
    return scores.flatten(2).softmax(-1).view(scores.shape) @ v


@formulation("b 4 4 4", "b 4 4 4", "b 4 4 4", fused=None)
def axes_swapped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Keys' features are summed with queries' heads: all sizes are equal."""
    return (q @ k * 0.4).softmax(-1) @ v.transpose(1, 2)


@formulation("b s s", "b s s", "b s s")
def keys_not_transposed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Q K without a transpose: keys are the columns of K, an attention over them."""
    return (q @ k * 0.3).softmax(-1) @ v


@formulation(*SQUARE, fused=0, declined=("",))
def values_on_the_wrong_side(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Pᵀ V: the sum runs over queries."""
    return _scores(q, k).softmax(-1).mT @ v


@formulation(*SQUARE, "b h s s", fused=0, declined=("",))
def weights_times_matrix(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    """Weights times a query × key tensor."""
    return (_scores(q, k).softmax(-1) * gate) @ v


@formulation(*SQUARE, "b 1 s s:float_mask", fused=0, declined=("",))
def weights_masked_after(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Masked after the softmax without renormalising."""
    return (_scores(q, k).softmax(-1) * mask) @ v


@formulation(*SQUARE, "b 1 s s:float_mask", fused=None)
def weights_renormalised(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Masked after the softmax and renormalised with an epsilon."""
    weights = _scores(q, k).softmax(-1) * mask
    return (weights / (weights.sum(-1, keepdim=True) + 1e-6)) @ v


@formulation(*SQUARE, fused=0, declined=("",))
def weights_added(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A residual on the weights: (P + I) V."""
    return (_scores(q, k).softmax(-1) + torch.eye(q.shape[2])) @ v


@formulation(*SQUARE, fused=0, declined=("",))
def weights_squared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Sharpened after the softmax."""
    return _scores(q, k).softmax(-1).square() @ v


@formulation(*SQUARE, fused=0, declined=("", ""))
def weights_softmaxed_twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax of a softmax."""
    return _scores(q, k).softmax(-1).softmax(-1) @ v


@formulation(*SQUARE, fused=None)
def top_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Only each row's two best keys: a mask of the scores themselves."""
    scores = _scores(q, k)
    lowest = scores.topk(2, -1).values[..., -1:]
    return scores.masked_fill(scores < lowest, float("-inf")).softmax(-1) @ v


@formulation(*SQUARE, fused=0, declined=("no-softmax",))
def sparsemax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Sparsemax instead of softmax."""
    scores = _scores(q, k)
    ordered = scores.sort(-1, descending=True).values
    rank = torch.arange(1, scores.shape[-1] + 1)
    total = ordered.cumsum(-1)
    count = (1 + rank * ordered > total).sum(-1, keepdim=True)
    threshold = (total.gather(-1, count - 1) - 1) / count
    return (scores - threshold).clamp(min=0) @ v


@formulation("b h s 1", "b h s 1", "b h s 1", "b 1 s s", fused=0, declined=("no-softmax",))
def one_feature_where_a_row_may_be_hidden(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """exp over its sum, of heads of width 1: a caller's bias may be −inf in a whole row."""
    powers = (q @ k.mT + bias).exp()
    return (powers / powers.sum(-1, keepdim=True)) @ v


@formulation(*SQUARE, fused=0, declined=("no-softmax",))
def sigmoid_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Sigmoid attention: no normaliser."""
    return (_scores(q, k) - 1.6).sigmoid() @ v


@formulation(*SQUARE, fused=0, declined=("no-softmax",))
def relu_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """ReLU over length."""
    return (_scores(q, k).relu() / q.shape[2]) @ v


@formulation(*SQUARE, fused=1)
def retention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Retention: scores times a decay, no softmax."""
    position = torch.arange(q.shape[2])
    decay = (0.9 ** (position[:, None] - position[None])).tril()
    return (_scores(q, k) * decay) @ v


@formulation(*SQUARE, fused=0, declined=("",))
def scores_clamped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores clamped to ±2."""
    return _scores(q, k).clamp(-2, 2).softmax(-1) @ v


@formulation(*SQUARE, fused=0, declined=("",))
def scores_squared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A non-linearity between product and softmax."""
    return _scores(q, k).square().softmax(-1) @ v


@formulation(*SQUARE, "b h s s", fused=None)
def scores_times_matrix(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    """Scores times a query × key tensor."""
    return (_scores(q, k) * gate).softmax(-1) @ v


@formulation(*SQUARE, fused=None)
def scores_convolved(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores smoothed along the keys."""
    scores = F.avg_pool2d(_scores(q, k), (1, 3), stride=1, padding=(0, 1))
    return scores.softmax(-1) @ v


@formulation(SELF, fused=0, declined=("synthesizer",))
class Synthesizer(nn.Module):
    """Synthesizer: scores from an MLP of the query, which are no product with keys."""

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.value = nn.Sequential(nn.Linear(M, 7), nn.ReLU(), nn.Linear(7, 5)), None
        self.project = nn.Linear(M, M)

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(x).softmax(-1) @ self.project(x)


@formulation("b h s e", fused=0)
class SynthesizerRandom(nn.Module):
    """Learned scores."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.zeros(3, 5, 5))

    def forward(self, v: Tensor) -> Tensor:
        return self.scores.softmax(-1) @ v


@formulation(Q, K, V, "b h t e", fused=None)
def values_differ_per_query(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """Values that depend on the query."""
    weights = _scores(q, k).softmax(-1)
    return (weights[..., None] * torch.relu(q.mean(-1)[..., None, None] + v[:, :, None])).sum(3)


@formulation(Q, "b h s t d", "b h t e", fused=None)
def keys_differ_per_query(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each query has its own keys."""
    return (torch.einsum("bhsd,bhstd->bhst", q, k) * 0.4).softmax(-1) @ v


@formulation("b s m", fused=0)
class Router(nn.Module):
    """A mixture of experts: softmax over experts, no attention."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(M, 4)
        self.experts = nn.ModuleList(nn.Linear(M, M) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x * 0.3).softmax(-1)
        outputs = torch.stack([expert(x) for expert in self.experts], -1)
        return (outputs * weights[:, :, None]).sum(-1)


@formulation("b s m", fused=0)
class RouterTop(nn.Module):
    """The same with the top two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(M, 4, bias=False)
        self.experts = nn.Parameter(torch.zeros(4, M, M))

    def forward(self, x: Tensor) -> Tensor:
        weights = F.softmax(self.gate(x), dim=-1)
        top, index = weights.topk(2, -1)
        gates = torch.zeros_like(weights).scatter(-1, index, top / top.sum(-1, keepdim=True))
        return torch.einsum("bse,emn,bsm->bsn", gates, self.experts, x)


@formulation("b m", fused=0)
class Classifier(nn.Module):
    """Class probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(M, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x).softmax(-1)


@formulation("b s m", fused=None)
class ExpectedEmbedding(nn.Module):
    """Softmax over a vocabulary times its embedding table: soft tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.table = nn.Linear(M, 11), nn.Embedding(11, M)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x).softmax(-1) @ self.table.weight


@formulation("b m 8", fused=0)
def distribution_focal(x: Tensor) -> Tensor:
    """YOLO's DFL: the mean of a softmax over bins."""
    return (x.softmax(-1) * torch.arange(8.0)).sum(-1)


@formulation("b m 4 5", fused=0)
class SelectiveKernel(nn.Module):
    """SKNet: softmax over branches of a channel descriptor."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Conv2d(M, M, 1), nn.Conv2d(M, M, 3, padding=1)
        self.branch = nn.Linear(M, 2 * M)

    def forward(self, x: Tensor) -> Tensor:
        branches = torch.stack([self.small(x), self.large(x)], 1)
        weights = self.branch(branches.sum(1).mean((2, 3))).view(-1, 2, M).softmax(1)
        return (branches * weights[..., None, None]).sum(1)
