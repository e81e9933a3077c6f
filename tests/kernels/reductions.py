"""Calls of ops along an axis: reductions, scans, sorts, norms and softmax."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.kernels.runner import Call, Calls, Case
from tests.kernels.values import (
    ALL,
    FLOATS,
    INTEGERS,
    NUMBERS,
    edges,
    moderate,
    numbers,
    ordinary,
    rows,
)

F32, F64 = (torch.float32,), (torch.float64,)
SOME = (torch.float32, torch.float16, torch.int64, torch.int32)
Values = Callable[[torch.dtype], torch.Tensor]
SUMS = {"ulps": 32, "scale": 512.0}
"""Sums of a few numbers up to 200."""
NORMS = {"ulps": 64, "scale": 1.0}


def along(text: str, results: int = 1, values: Values = edges, compared: int = 9) -> Calls:
    """Along the last axis, the first and the middle one, and along one of size 1."""

    def calls(dtype: torch.dtype) -> list[Call]:
        line = values(dtype)
        table = rows(line)
        shapes = {-1: table, 0: table.mT.contiguous(), 1: line.reshape(1, -1, 1), -2: line[None]}
        return [
            Call(text.replace("{}", str(dim)), (shape,), results, compared)
            for dim, shape in shapes.items()
        ]

    return calls


def last(text: str, results: int = 1, values: Values = edges, compared: int = 9) -> Calls:
    """Along the last axis alone, for what is made of many nodes."""

    def calls(dtype: torch.dtype) -> list[Call]:
        return [Call(text, (rows(values(dtype)),), results, compared)]

    return calls


def whole(text: str, values: Values = edges) -> Calls:
    def calls(dtype: torch.dtype) -> list[Call]:
        line = values(dtype)
        finite = line[line.isfinite()]
        return [Call(text, (part,)) for part in (line, finite, line[:1], ordinary(dtype, 3, 4))]

    return calls


def none(text: str, *dims: int) -> Calls:
    """Of (0, 3), along the axis without elements and along the other."""

    def calls(dtype: torch.dtype) -> list[Call]:
        empty = edges(dtype)[:0].reshape(0, 3)
        return [Call(text.replace("{}", str(dim)), (empty,)) for dim in dims]

    return calls


def few(dtype: torch.dtype) -> torch.Tensor:
    return moderate(dtype)[:8]


def finite(dtype: torch.dtype) -> torch.Tensor:
    values = edges(dtype)
    return values[values.isfinite()]


def with_nan(dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([1.0, torch.nan, torch.inf, -torch.inf, 2.0], dtype=dtype)


def _hidden(dtype: torch.dtype) -> list[Call]:
    """Rows that masks hide in one way or in two, beside rows of infinities and NaN."""
    low, size = torch.finfo(dtype).min, 5
    line = torch.tensor([-torch.inf, low, 1.0, torch.inf, torch.nan, low / 2], dtype=dtype)
    table = torch.cartesian_prod(line, line)
    table = torch.cat([table, table[:, :1].expand(-1, size - 2)], 1)
    texts = [
        f"aten.logsumexp(%0) {{dim = {dim}, keepdim = {keep}}}"
        for dim in ("[-1]", "[0]", "[0, 1]")
        for keep in ("true", "false")
    ]
    return [Call(text, (table,)) for text in texts]


def distinct(text: str) -> Calls:
    """Rows of different numbers."""

    def calls(dtype: torch.dtype) -> list[Call]:
        values = numbers(dtype).unique()
        return [Call(text, (torch.stack([values, values.flip(0), values.roll(3)]),), 2)]

    return calls


def _dim(name: str) -> str:
    return f"aten.{name}(%0) {{dim = {{}}}}"


def _dims(name: str) -> str:
    return f"aten.{name}(%0) {{dim = [{{}}]}}"


LAYER = "{normalized_shape = [5], eps = 0.0009765625}"
GROUPS = "{num_groups = 2, eps = 0.0009765625}"
BATCH = "training = false, momentum = 0.1, eps = 0.0009765625, cudnn_enabled = false"
INSTANCE = "use_input_stats = true, momentum = 0.1, eps = 0.0009765625, cudnn_enabled = false"
SORTED = "aten.sort.stable(%0) {stable = true, dim = {}, descending = %s}"
TOP = "aten.topk(%0) {k = 2, dim = -1, largest = LARGEST}"
NAN_PLACE = "onnxruntime passes over NaN: the place is that of another element"


def _norms(dtype: torch.dtype) -> list[Call]:
    table = rows(moderate(dtype))
    scale, shift = ordinary(dtype, 5), ordinary(dtype, 5, seed=1)
    return [
        Call(f"aten.layer_norm(%0) {LAYER}", (table,)),
        Call(f"aten.layer_norm(%0, %1, %2) {LAYER}", (ordinary(dtype, 3, 5), scale, shift)),
        Call("aten.layer_norm(%0) {normalized_shape = [1], eps = 0.5}", (table[:, :1],)),
    ]


CASES = [
    *[Case(name, along(_dims(name)), ALL) for name in ("amax", "amin", "any.dims", "all.dims")],
    *[
        Case(name, along(_dims(name), values=moderate), ALL, **SUMS)
        for name in ("sum.dim_IntList", "mean.dim", "logsumexp")
    ],
    Case("logsumexp-hidden", _hidden, FLOATS, **SUMS),
    Case("cumsum", along(_dim("cumsum"), values=moderate), ALL, ulps=128, scale=512.0),
    Case("prod", along(_dim("prod.dim_int"), values=lambda dtype: few(dtype)[:4]), ALL, ulps=32),
    Case("prod-large", along(_dim("prod.dim_int")), (torch.int64,)),
    Case("cumprod", last("aten.cumprod(%0) {dim = -1}", values=few), SOME, ulps=32),
    Case("logcumsumexp", last("aten.logcumsumexp(%0) {dim = -1}", values=few), F32, **SUMS),
    *[Case(name, along(_dim(name), values=numbers), ALL) for name in ("argmax", "argmin")],
    *[
        Case(
            f"{name}-nan",
            last(_dim(name).replace("{}", "-1"), values=with_nan),
            FLOATS,
            difference=NAN_PLACE,
        )
        for name in ("argmax", "argmin")
    ],
    *[Case(name, along(_dim(name), 2, numbers), ALL) for name in ("max.dim", "min.dim")],
    *[Case(f"{name}-values", along(_dim(name), 2, edges, 1), ALL) for name in ("max.dim",)],
    Case(
        "max.dim-nan", last("aten.max.dim(%0) {dim = -1}", 2, with_nan), F32, difference=NAN_PLACE
    ),
    *[
        Case(name, last(_dim(name).replace("{}", "-1"), 2), F32)
        for name in ("cummax", "cummin", "nanmedian.dim")
    ],
    *[
        Case(f"{name}-values", last(_dim(name).replace("{}", "-1"), 2, edges, 1), INTEGERS)
        for name in ("cummax", "cummin")
    ],
    Case("median.dim", last("aten.median.dim(%0) {dim = -1}", 2, edges, 1), SOME),
    *[Case(f"{name}-all", whole(f"aten.{name}(%0)"), ALL) for name in ("max", "min", "any", "all")],
    *[
        Case(f"{name}-all", whole(f"aten.{name}(%0)", numbers), ALL)
        for name in ("argmax", "argmin")
    ],
    *[
        Case(f"{name}-all", whole(f"aten.{name}(%0)", moderate), ALL, ulps=64, scale=2048.0)
        for name in ("sum", "mean")
    ],
    Case("prod-all", whole("aten.prod(%0)", few), FLOATS, ulps=64),
    *[
        Case(
            f"topk-values-{largest}", last(TOP.replace("LARGEST", largest), 2, numbers, 1), NUMBERS
        )
        for largest in ("true", "false")
    ],
    *[
        Case(f"topk-places-{largest}", distinct(TOP.replace("LARGEST", largest)), NUMBERS)
        for largest in ("true", "false")
    ],
    Case(
        "topk-nan",
        last(TOP.replace("LARGEST", "true"), 2, with_nan, 1),
        FLOATS,
        difference="before onnxruntime 1.32 TopK leaves open where NaN goes; it is the largest",
        until=(1, 32),
    ),
    *[
        Case(f"sort-{down}", along(SORTED.replace("%s", down), 2, numbers), ALL)
        for down in ("true", "false")
    ],
    Case("sort-up-nan", along(SORTED.replace("%s", "false"), 2), FLOATS),
    Case(
        "sort-down-nan",
        last("aten.sort.stable(%0) {stable = true, dim = -1, descending = true}", 2, with_nan),
        FLOATS,
        difference="NaN is sorted as ∞ is, so an ∞ that stands before it stays before it",
    ),
    Case("kthvalue", distinct("aten.kthvalue(%0) {k = 1, dim = -1}"), SOME),
    Case("softmax", along(_dim("softmax.int")), FLOATS, ulps=16, scale=1.0),
    Case("log_softmax", along(_dim("log_softmax.int"), values=finite), FLOATS, ulps=16, scale=1.0),
    Case(
        "log_softmax-nan",
        last("aten.log_softmax.int(%0) {dim = -1}", values=with_nan),
        F64,
        difference="LogSoftmax of float64 gives −∞ in a row with NaN or ∞",
    ),
    *[
        Case(
            name,
            along(f"aten.{name}(%0) {{dim = [{{}}], correction = 0}}", values=moderate),
            FLOATS,
            ulps=64,
            scale=4096.0,
        )
        for name in ("var.correction", "std.correction")
    ],
    *[
        Case(
            f"norm-{p}",
            along(f"aten.linalg_vector_norm(%0) {{ord = {p}, dim = [{{}}]}}", values=moderate),
            FLOATS,
            ulps=64,
            scale=1.0,
        )
        for p in ("0.0", "1.0", "2.0", "3.0", "inf", "-inf", "0.5")
    ],
    Case("layer_norm", _norms, FLOATS, **NORMS),
    Case(
        "layer_norm-eps",
        lambda dtype: [
            Call(
                "aten.layer_norm(%0) {normalized_shape = [5], eps = 1e-5}",
                (ordinary(dtype, 3, 5) / 64,),
            )
        ],
        F64,
        difference="ε is a float32 in LayerNormalization, RMSNormalization and "
        "BatchNormalization, whatever they compute in",
        **NORMS,
    ),
    Case(
        "rms_norm",
        lambda dtype: [Call(f"aten.rms_norm(%0) {LAYER}", (rows(moderate(dtype)),))],
        FLOATS,
        **NORMS,
    ),
    Case(
        "group_norm",
        lambda dtype: [
            Call(f"aten.group_norm(%0) {GROUPS}", (ordinary(dtype, 3, 4, 5),)),
            Call(f"aten.group_norm(%0, %1) {GROUPS}", (ordinary(dtype, 3, 4), ordinary(dtype, 4))),
        ],
        FLOATS,
        **NORMS,
    ),
    Case(
        "instance_norm",
        lambda dtype: [
            Call(
                f"aten.instance_norm(%0, none, none, none, none) {{{INSTANCE}}}",
                (ordinary(dtype, 3, 4, 5),),
            )
        ],
        FLOATS,
        **NORMS,
    ),
    Case(
        "batch_norm",
        lambda dtype: [
            Call(
                f"aten.batch_norm(%0, %1, %1, %1, %1) {{{BATCH}}}",
                (rows(moderate(dtype), 4)[:, :, None], ordinary(dtype, 4).abs() + 1),
            )
        ],
        FLOATS,
        **NORMS,
    ),
    Case(
        "cosine_similarity",
        lambda dtype: [
            Call(
                "aten.cosine_similarity(%0, %1) {dim = -1}",
                (rows(moderate(dtype)), rows(moderate(dtype)).flip(0)),
            )
        ],
        FLOATS,
        **NORMS,
    ),
    *[
        Case(f"{name}-none", none(_dims(name), 0, 1), (torch.float32, torch.int64))
        for name in ("sum.dim_IntList", "any.dims", "all.dims")
    ],
    *[
        Case(f"{name}-none", none(_dim(name), 0, 1), (torch.float32, torch.int64))
        for name in ("cumsum", "softmax.int")
    ],
    Case("amax-none", none(_dims("amax"), 1), (torch.float32, torch.int64)),
    Case("mean-none", none(_dims("mean.dim"), 0), F32),
]
