"""Ops that have no ONNX operator and no function of torchlib that holds: their own formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.export import Dim
from torch.nn.utils.rnn import pad_sequence
from torch.utils import _pytree as pytree

from attngraph.export.lowering.lower import lower
from attngraph.frontend.capture import capture
from tests.export.lowered import assert_same, module, run, session_of
from tests.variants import some_wide

B = 3
"""The batch of the samples; a tensor whose first axis has this size is run with another as well."""


def floats(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def integers(*shape: int, high: int = 4) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(1))


X = floats(B, 4, 6)
Y = X.flip(1) + 0.25
IMAGE, VOLUME = floats(B, 4, 8, 8), floats(B, 2, 4, 6, 6)
GAPS = torch.where(X > 1, math.nan, X)
TIES = X.round()
PLACES = integers(B, 5, 6)
BAGS, TABLE = integers(B, 4, high=5), floats(5, 6)
EDGES = torch.tensor([-1.0, 0.0, 1.0])
EXTREMES = torch.tensor([[0.0, -0.0, math.inf, -math.inf, 3e38, 1.0]] * B)
WHOLE = torch.tensor([[-7, 0, 3, 9]] * B)

Case = tuple[Callable[..., Any], tuple[Tensor, ...]]

# fmt: off
CASES: dict[str, Case] = {
    # pointwise
    "fmax": (lambda x, y: torch.fmax(x, y), (GAPS, Y)),
    "fmin": (lambda x, y: torch.fmin(x, y), (X, GAPS.flip(1))),
    "fmax-of-integers": (lambda x: torch.fmax(x, x.flip(1)), (WHOLE,)),
    "hypot": (lambda x, y: torch.hypot(x, y), (EXTREMES, EXTREMES.flip(1))),
    "copysign": (lambda x, y: torch.copysign(x, y), (EXTREMES, EXTREMES.flip(1))),
    "logsigmoid": (lambda x: F.logsigmoid(x * 9), (X,)),
    "rrelu": (lambda x: F.rrelu(x), (X,)),
    "logit": (lambda x: torch.logit(x), (torch.sigmoid(X),)),
    "logit-of-gaps": (lambda x: torch.special.logit(x, 0.1), (torch.sigmoid(GAPS),)),
    "remainder-of-a-number": (lambda x: (7 % x, -7 % x), (1e-4 * Y,)),
    "softshrink": (lambda x: F.softshrink(x), (X,)),
    "relu-of-integers": (lambda x: F.relu(x), (WHOLE,)),
    "trunc-of-integers": (lambda x: torch.trunc(x), (WHOLE,)),
    "isfinite-of-integers": (lambda x: torch.isfinite(x), (WHOLE,)),
    "log-ndtr": (lambda x: torch.special.log_ndtr(x), (X,)),
    # along an axis
    "cumprod": (lambda x: x.cumprod(1), (X,)),
    "cumprod-of-integers": (lambda x: x.cumprod(-1), (WHOLE,)),
    "cummax": (lambda x: x.cummax(1), (TIES,)),
    "cummax-of-gaps": (lambda x: x.cummax(-1), (GAPS,)),
    "cummin": (lambda x: x.cummin(-1), (TIES,)),
    "median": (lambda x: x.median(), (X,)),
    "median-along": (lambda x: x.median(1).values, (GAPS,)),
    "nanmedian": (lambda x: x.nanmedian(1).values, (GAPS,)),
    "nanmean": (lambda x: x.nanmean(1), (GAPS,)),
    "kthvalue": (lambda x: x.kthvalue(2, 1, keepdim=True), (X,)),
    "quantile": (lambda x: x.quantile(0.3, dim=1), (X,)),
    "quantiles": (lambda x: torch.quantile(x, torch.tensor([0.1, 0.5, 0.9]), dim=1, keepdim=True),
                  (GAPS,)),
    "quantiles-of-all": (lambda x: torch.quantile(x, torch.tensor([0.5, 0.9])), (X,)),
    **{f"quantile-{mode}": (
        lambda x, mode=mode: torch.quantile(x, torch.tensor([0.3]), dim=-1, interpolation=mode),
        (X,)) for mode in ("lower", "higher", "midpoint", "nearest")},
    "nanquantile": (lambda x: x.nanquantile(0.3, dim=1), (GAPS,)),
    "sort-stable": (lambda x: torch.sort(x, stable=True, dim=-1), (TIES,)),
    "sort-stable-down": (lambda x: torch.sort(x, stable=True, dim=1, descending=True), (TIES,)),
    "argsort-stable": (lambda x: torch.argsort(x, dim=1, stable=True), (TIES,)),
    "sort-of-gaps": (lambda x: (x.sort(1)[0], x.sort(-1, descending=True)[0]), (GAPS,)),
    "sort-of-bools": (lambda x: (x > 0).sort(1).values, (X,)),
    "vander": (lambda x: torch.vander(x, 4), (floats(5),)),
    "var-mean": (lambda x: torch.var_mean(x, 1), (X,)),
    "std-mean-of-all": (lambda x: torch.std_mean(x), (X,)),
    "renorm": (lambda x: x.renorm(2, 0, 1.0), (X,)),
    "trace": (lambda x: torch.trace(x[:, :, 0]), (X,)),
    "bucketize": (lambda x: torch.bucketize(x, EDGES), (X,)),
    "bucketize-by-lengths": (lambda x: torch.bucketize(x, x[:, 0, 0].sort().values), (X,)),
    "bucketize-right": (lambda x: torch.bucketize(x, x[:, 0, 0].sort().values, right=True,
                                                  out_int32=True), (TIES,)),
    "searchsorted-of-gaps": (lambda x: torch.searchsorted(EDGES, x, right=True), (GAPS,)),
    "searchsorted": (lambda x: torch.searchsorted(x.sort(-1).values, x * 2), (TIES,)),
    "searchsorted-right": (lambda x: torch.searchsorted(EDGES, x, right=True), (TIES,)),
    "searchsorted-number": (lambda x: torch.searchsorted(x[0, 0].sort().values, 0.5), (X,)),
    # distances
    **{f"cdist-{p}": (lambda x, y, p=p: torch.cdist(x, y, p=p), (X, Y))
       for p in (0.0, 1.0, 2.0, 3.0, math.inf)},
    "cdist-of-many": (lambda x, y: torch.cdist(x, y), (floats(B, 40, 6), floats(B, 50, 6) + 2)),
    "pdist": (lambda x: torch.pdist(x[0]), (X,)),
    # gathers and scatters
    "padded": (lambda x: pad_sequence([x[x > 0], x[x > 1]], padding_value=-1.0), (X,)),
    "padded-before": (
        lambda x: pad_sequence([x[x > 1], x[x > 0]], batch_first=True, padding_side="left"), (X,)),
    "masked-select": (lambda x: x.masked_select(x[:, :1] > 0), (X,)),
    "bool-index-behind": (lambda x, m: x[:, m], (X, X[0] > 0)),
    "index-fill": (lambda x: x.index_fill(1, torch.tensor([0, -1]), 7.0), (X,)),
    "index-reduce": (lambda x: x.index_reduce(1, torch.tensor([0, 2, 2]), x[:, :3], "amax"), (X,)),
    "scatter-multiply": (lambda x, k: x.scatter(1, k, x.repeat(1, 2, 1), reduce="multiply"),
                         (X, PLACES)),
    **{f"scatter-mean-{own}": (
        lambda x, k, own=own: x.scatter_reduce(1, k, x.repeat(1, 2, 1), "mean", include_self=own),
        (X, PLACES)) for own in (True, False)},
    "put": (lambda x: x.put(torch.tensor([0, -1]), torch.ones(2)), (X,)),
    "put-accumulates": (lambda x: x.put(torch.tensor([5, 5]), torch.ones(2), accumulate=True),
                        (X,)),
    "diagonal-scatter": (
        lambda x: torch.diagonal_scatter(x, torch.ones(x.shape[0], 4), 1, 1, 2), (X,)),
    **{f"bag-{mode}": (lambda k, w, mode=mode: F.embedding_bag(k, w, mode=mode), (BAGS, TABLE))
       for mode in ("sum", "mean", "max")},
    "bag-offsets": (lambda k, w: F.embedding_bag(k, w, torch.tensor([0, 2, 2, 5])),
                    (integers(7), TABLE)),
    "bag-offsets-max": (lambda k, w: F.embedding_bag(k, w, torch.tensor([0, 2, 2, 7]), mode="max"),
                        (integers(7), TABLE)),
    "bag-last-offset": (
        lambda k, w: F.embedding_bag(k, w, torch.tensor([0, 2, 7]), include_last_offset=True),
        (integers(7), TABLE)),
    "bag-weights": (lambda k, w, s: F.embedding_bag(k, w, mode="sum", per_sample_weights=s),
                    (BAGS, TABLE, floats(B, 4))),
    "bag-padding": (lambda k, w: F.embedding_bag(k, w, padding_idx=1), (BAGS, TABLE)),
    # images
    "pool-divisor": (lambda x: F.avg_pool2d(x, 3, 2, 1, divisor_override=5), (IMAGE,)),
    "unpool": (lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), (IMAGE,)),
    "adaptive-average": (lambda x: F.adaptive_avg_pool2d(x, 3), (IMAGE,)),
    "adaptive-average-3d": (lambda x: F.adaptive_avg_pool3d(x, (3, 2, 4)), (VOLUME,)),
    "adaptive-maximum-1d": (lambda x: F.adaptive_max_pool1d(x, 4, return_indices=True), (X,)),
    "adaptive-maximum-2d": (lambda x: F.adaptive_max_pool2d(x, 3, return_indices=True), (IMAGE,)),
    "conv-tbc": (lambda x, w, b: torch.conv_tbc(x, w, b, 1),
                 (floats(7, B, 4), floats(2, 4, 5), floats(5))),
    "linear-upsampling": (lambda x: F.interpolate(x, size=7, mode="linear"), (X,)),
    "exact-nearest": (lambda x: F.interpolate(x, size=(5, 11), mode="nearest-exact"), (IMAGE,)),
    # losses
    "smooth-l1": (lambda x, y: F.smooth_l1_loss(x, y), (X, Y)),
    "smoothed-classes": (lambda x, k: F.cross_entropy(x, k, label_smoothing=0.1),
                         (X[:, :, 0], integers(B))),
    "cosine-embedding": (lambda x, y: F.cosine_embedding_loss(x, y, x[:, 0].sign()),
                         (X[..., 0], Y[..., 0])),
}
# fmt: on


@pytest.mark.filterwarnings("ignore:index_reduce", "ignore:The reduce argument")
@pytest.mark.parametrize("name", some_wide(CASES))
@pytest.mark.parametrize(
    "dynamic",
    [pytest.param(False, marks=pytest.mark.wide, id="static"), pytest.param(True, id="batch")],
)
def test_formula(name: str, dynamic: bool) -> None:
    function, inputs = CASES[name]
    batch = {0: Dim("batch", max=64)}
    shapes = tuple(batch if x.shape[0] == B else None for x in inputs) if dynamic else None
    if dynamic and not any(shapes or ()):
        pytest.skip("no input has a batch")
    model = module(function, len(inputs))
    session = session_of(lower(capture(model, inputs, dynamic_shapes=shapes).graph))
    wider = tuple(torch.cat([x, x[:2]]) if x.shape[0] == B else x for x in inputs)
    for given in [inputs, wider] if dynamic else [inputs]:
        expected = [x for x in pytree.tree_leaves(model(*given)) if isinstance(x, Tensor)]
        for actual, wanted in zip(run(session, given), expected, strict=True):
            assert_same(actual, wanted, name)


POOLS: dict[str, Callable[[Tensor], Any]] = {
    "average-1d": lambda x: F.adaptive_avg_pool1d(x.mT, 4),
    "average-2d": lambda x: F.adaptive_avg_pool2d(x[:, None], (3, 4)),
    "average-3d": lambda x: F.adaptive_avg_pool3d(x[:, None, :, None], (3, 1, 2)),
    "average-along-one": lambda x: F.adaptive_avg_pool2d(x[:, None], (None, 3)),
    "maximum-1d": lambda x: F.adaptive_max_pool1d(x.mT, 4, return_indices=True),
    "maximum-2d": lambda x: F.adaptive_max_pool2d(x[:, None], (3, 2), return_indices=True),
    "area": lambda x: F.interpolate(x.mT, size=3, mode="area"),
}


@pytest.mark.parametrize("name", POOLS)
def test_bins_follow_a_length_that_only_a_run_tells(name: str) -> None:
    """torch's own decomposition is that of the sample's length, which the bins divide."""
    model, sample = module(POOLS[name], 1), floats(2, 12, 6)
    graph = capture(model, (sample,), dynamic_shapes=({1: Dim("length")},)).graph
    session = session_of(lower(graph))
    for length in (1, 2, 4, 7, 12, 23):
        x = floats(2, length, 6)
        x[0, -1] = math.nan
        expected = [y for y in pytree.tree_leaves(model(x)) if isinstance(y, Tensor)]
        for actual, wanted in zip(run(session, (x,)), expected, strict=True):
            if "maximum" not in name or actual.is_floating_point():
                assert_same(actual, wanted, f"{name} at {length}")


TOLD: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "average-2d": lambda x, y: F.adaptive_avg_pool2d(x[:, None], (y.shape[1], 5)),
    "average-3d": lambda x, y: F.adaptive_avg_pool3d(x[:, None, None], (1, *y.shape[1:])),
    "area": lambda x, y: F.interpolate(x[:, None], size=y.shape[1:], mode="area"),
    "of half the length": lambda x, y: F.adaptive_avg_pool2d(x[:, None], (x.shape[1] // 2, 6)),
}


@pytest.mark.parametrize("name", TOLD)
def test_the_number_of_bins_may_be_told_by_a_run(name: str) -> None:
    """torch's own decomposition is that of the sample's sizes: of bins that are of one length."""

    class Pool(torch.nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            return TOLD[name](x, y), y + 1

    rows, columns = Dim("rows", min=4, max=99), Dim("columns", min=2, max=99)
    shapes = ({1: rows}, {1: columns})
    sample = floats(2, 12, 6), floats(2, 5, 4)
    session = session_of(lower(capture(Pool().eval(), sample, dynamic_shapes=shapes).graph))
    for length, bins in ((12, 5), (12, 12), (7, 3), (4, 9), (23, 2), (40, 39)):
        given = floats(2, length, 6), floats(2, bins, 4)
        given[0][0, -1] = math.nan
        expected = [y for y in pytree.tree_leaves(Pool()(*given)) if isinstance(y, Tensor)]
        for actual, wanted in zip(run(session, given), expected, strict=True):
            assert_same(actual, wanted, f"{name} of {length} to {bins}")


def test_the_first_of_equal_maxima_is_taken() -> None:
    model = module(lambda x: F.adaptive_max_pool2d(x, (3, 2), return_indices=True), 1)
    sizes = {1: Dim("height", min=3, max=40), 2: Dim("width", min=3, max=40)}
    graph = capture(model, (floats(2, 12, 6),), dynamic_shapes=(sizes,)).graph
    session = session_of(lower(graph))
    for height, width in ((12, 6), (3, 40), (17, 5)):
        x = floats(2, height, width).sign()
        for actual, wanted in zip(run(session, (x,)), model(x), strict=True):
            assert_same(actual, wanted, f"{height} × {width}")


RUNNING: dict[str, Callable[[Tensor], Any]] = {
    "cumprod": lambda x: x.cumprod(1),
    "cummax": lambda x: x.round().cummax(1),
    "cummin": lambda x: x.round().cummin(-2),
    "logcumsumexp": lambda x: (x * 1000).logcumsumexp(1),
    "roll": lambda x: x.roll((x.shape[1] // 2, -x.shape[1]), (1, 2)),
    "median": lambda x: x.median(1).values,
    "diff": lambda x: x.diff(dim=1),
    "diff-of-three": lambda x: torch.diff(x, 2, 1, prepend=x[:, :1], append=x[:, -1:] * 2),
    "diff-of-bools": lambda x: (x > 0).diff(dim=1),
    "roll-of-all": lambda x: x.roll(-(x.shape[1] // 3)),
}


@pytest.mark.parametrize(("name", "most"), [*((name, 70) for name in RUNNING), ("cumprod", None)])
def test_what_runs_along_a_length_that_only_a_run_tells(name: str, most: int | None) -> None:
    model, sample = module(RUNNING[name], 1), floats(2, 12, 3)
    shapes = ({1: Dim("length", max=most)},)
    session = session_of(lower(capture(model, (sample,), dynamic_shapes=shapes).graph))
    for length in (1, 2, 3, 12, 64, 70):
        x = floats(2, length, 3)
        x[0, length // 2, 0] = math.nan
        expected = [y for y in pytree.tree_leaves(model(x)) if isinstance(y, Tensor)]
        for actual, wanted in zip(run(session, (x,)), expected, strict=True):
            assert_same(actual, wanted, f"{name} at {length}")
