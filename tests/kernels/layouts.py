"""Calls of ops that move elements: layouts, gathers, scatters, and what is made of sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from attngraph.ir.types import dtype_name
from tests.kernels.runner import Call, Calls, Case
from tests.kernels.values import ALL, FLOATS, NUMBERS, edges, ordinary

Make: TypeAlias = "torch.Tensor | Callable[[torch.dtype], torch.Tensor]"
"""An operand, or what makes it of the dtype."""

F32, I64 = (torch.float32,), (torch.int64,)
MANY = (torch.float32, torch.float16, torch.int64, torch.int32, torch.bool)
PLACES = torch.tensor([0, 2, -1, 0, 1])
WINDOW = {"ulps": 8, "scale": 1.0}
IN_BYTES = "scale = 0.5, zero_point = 3, quant_min = 0, quant_max = 255"
QUANTIZED = f"aten.fake_quantize_per_tensor_affine(%0) {{{IN_BYTES}}}"
EVEN = torch.arange(12).reshape(3, 4) % 2 == 0


def on(text: str, *operands: Make, results: int = 1, compared: int = 9) -> Calls:
    """One call."""

    def calls(dtype: torch.dtype) -> list[Call]:
        made = tuple(part if isinstance(part, torch.Tensor) else part(dtype) for part in operands)
        return [Call(text, made, results, compared)]

    return calls


def table(dtype: torch.dtype) -> torch.Tensor:
    """(3, 4)."""
    values = edges(dtype)
    return values[torch.arange(12) % len(values)].reshape(3, 4)


def of_tables(*texts: str) -> Calls:
    """Of (3, 4), of (1, 1) and of (0, 4)."""

    def calls(dtype: torch.dtype) -> list[Call]:
        whole = table(dtype)
        return [Call(text, (part,)) for text in texts for part in (whole, whole[:1, :1], whole[:0])]

    return calls


def _halves(dtype: torch.dtype) -> torch.Tensor:
    """What rounds to even, and what lies beyond the range."""
    return torch.tensor([0.0, 0.25, 0.75, -0.25, 1.25, 500.0, -500.0], dtype=dtype)


def _scores(dtype: torch.dtype) -> torch.Tensor:
    return ordinary(dtype, 3, 4)


def _image(dtype: torch.dtype) -> torch.Tensor:
    return ordinary(dtype, 1, 2, 6, 6)


def _made(dtype: torch.dtype) -> list[Call]:
    """More elements than are stored as they are."""
    name = dtype_name(dtype)
    return [
        Call(f"aten.full() {{size = [2, 5000], fill_value = 1, dtype = {name}}}"),
        Call(f"aten.arange.start_step() {{start = -3, end = 9000, step = 2, dtype = {name}}}"),
    ]


def _eye(dtype: torch.dtype) -> list[Call]:
    return [Call(f"aten.eye.m() {{n = 3, m = 5000, dtype = {dtype_name(dtype)}}}")]


CASES = [
    Case("transpose", of_tables("aten.permute(%0) {dims = [1, 0]}"), ALL),
    Case("view", of_tables("aten.flatten.using_ints(%0)", "aten.unsqueeze(%0) {dim = 1}"), ALL),
    Case("squeeze", on("aten.squeeze.dim(%0) {dim = 0}", lambda d: edges(d)[None]), ALL),
    Case("expand", on("aten.expand(%0) {size = [2, 3, 4]}", table), ALL),
    Case(
        "slice",
        of_tables(
            "aten.slice.Tensor(%0) {dim = 1, start = 1, end = 9223372036854775807, step = 2}",
            "aten.slice.Tensor(%0) {dim = 0, start = 1, end = 2}",
        ),
        ALL,
    ),
    Case("select", on("aten.select.int(%0) {dim = 0, index = -1}", table), ALL),
    Case(
        "split",
        on("aten.split_with_sizes(%0) {split_sizes = [1, 0, 3], dim = 1}", table, results=3),
        ALL,
    ),
    Case("cat", on("aten.cat(%0, %1) {dim = 1}", table, lambda d: table(d)[:, :0]), ALL),
    Case("stack", on("aten.stack(%0, %1) {dim = 1}", table, table), ALL),
    Case("repeat", on("aten.repeat(%0) {repeats = [2, 1, 3]}", table), ALL),
    Case("flip", of_tables("aten.flip(%0) {dims = [1]}"), ALL),
    Case("roll", on("aten.roll(%0) {shifts = [5, -1], dims = [0, 1]}", table), ALL),
    Case("pad", on("aten.constant_pad_nd(%0) {pad = [1, 0, -1, 2], value = 1}", table), ALL),
    *[
        Case(
            f"pad-{mode}",
            on(f'aten.pad(%0) {{pad = [1, 2], mode = "{mode}"}}', lambda d: ordinary(d, 1, 2, 4)),
            MANY,
        )
        for mode in ("reflect", "replicate", "circular")
    ],
    Case(
        "triangle", of_tables("aten.tril(%0) {diagonal = -1}", "aten.triu(%0) {diagonal = 1}"), ALL
    ),
    Case("diagonal", on("aten.diagonal(%0)", table), MANY),
    Case("eye", _eye, ALL),
    Case(
        "full",
        _made,
        (torch.float32, torch.int64),
    ),
    Case("index_select", on("aten.index_select(%0, %1) {dim = 1}", table, PLACES.clamp(0)), ALL),
    Case("index", on("aten.index.Tensor(%0, %1, %1)", table, PLACES), ALL),
    Case("index-of-one", on("aten.index.Tensor(%0, none, %1)", table, PLACES), ALL),
    Case(
        "index-of-bools",
        on("aten.index.Tensor(%0, %1)", table, torch.tensor([True, False, True])),
        ALL,
    ),
    Case(
        "index-of-no-bool",
        on("aten.index.Tensor(%0, %1)", table, torch.zeros(3, 4, dtype=torch.bool)),
        ALL,
    ),
    Case(
        "masked_select",
        on("aten.masked_select(%0, %1)", table, EVEN),
        ALL,
    ),
    Case("nonzero", of_tables("aten.nonzero(%0)"), ALL),
    Case(
        "gather",
        on("aten.gather(%0, %1) {dim = 1}", table, PLACES[:3, None].clamp(0).expand(3, 2)),
        ALL,
    ),
    Case(
        "scatter",
        on("aten.scatter.src(%0, %1, %2) {dim = 1}", table, torch.tensor([[3, 0]] * 3), table),
        ALL,
    ),
    Case(
        "scatter_add",
        on(
            "aten.scatter_add(%0, %1, %2) {dim = 1}",
            lambda d: ordinary(d, 3, 4),
            torch.tensor([[3, 3]] * 3),
            lambda d: ordinary(d, 3, 4, seed=1),
        ),
        MANY,
        ulps=4,
        scale=4,
    ),
    *[
        Case(
            f"scatter-{how}",
            on(
                f'aten.scatter_reduce.two(%0, %1, %2) {{dim = 1, reduce = "{how}"}}',
                table,
                torch.tensor([[3, 3, 0, 1]] * 3),
                lambda d: table(d).flip(1),
            ),
            NUMBERS,
            ulps=4,
        )
        for how in ("amax", "amin")
    ],
    *[
        Case(
            f"scatter-{how}",
            on(
                f'aten.scatter_reduce.two(%0, %1, %2) {{dim = 1, reduce = "{how}"}}',
                lambda d: ordinary(d, 3, 4),
                torch.tensor([[3, 3, 0, 1]] * 3),
                lambda d: ordinary(d, 3, 4, seed=2),
            ),
            NUMBERS,
            ulps=8,
            scale=4,
        )
        for how in ("sum", "prod")
    ],
    Case(
        "index_add",
        on(
            "aten.index_add(%0, %1, %2) {dim = 0}",
            lambda d: ordinary(d, 3, 4),
            PLACES[:2].clamp(0),
            lambda d: ordinary(d, 2, 4),
        ),
        MANY,
        ulps=4,
        scale=4,
    ),
    Case(
        "index_put",
        on("aten.index_put(%0, %1, %2)", table, torch.tensor([2, 0]), lambda d: table(d)[1:]),
        ALL,
    ),
    Case(
        "slice_scatter",
        on(
            "aten.slice_scatter(%0, %1) {dim = 0, start = 1, end = 3}",
            table,
            lambda d: table(d)[:2],
        ),
        MANY,
    ),
    Case(
        "select_scatter",
        on("aten.select_scatter(%0, %1) {dim = 0, index = 1}", table, lambda d: table(d)[0]),
        MANY,
    ),
    Case(
        "masked_scatter",
        on(
            "aten.masked_scatter(%0, %1, %2)",
            table,
            EVEN,
            table,
        ),
        MANY,
    ),
    Case("embedding", on("aten.embedding(%0, %1)", table, torch.tensor([[0, 2], [1, 1]])), FLOATS),
    Case("one_hot", on("aten.one_hot(%0) {num_classes = 5}", torch.tensor([0, 4, 2])), I64),
    Case("bincount", on("aten.bincount(%0) {minlength = 5}", torch.tensor([0, 4, 2, 4])), I64),
    Case(
        "bucketize",
        on("aten.bucketize.Tensor(%0, %1)", edges, lambda d: torch.tensor([-1, 0, 2, 3]).to(d)),
        (torch.float32, torch.int64, torch.int32),
    ),
    Case("unfold", on("aten.unfold(%0) {dimension = 1, size = 2, step = 1}", table), MANY),
    Case("as_strided", on("aten.as_strided(%0) {size = [2, 2], stride = [4, 1]}", table), MANY),
    Case(
        "pixel_shuffle",
        on("aten.pixel_shuffle(%0) {upscale_factor = 2}", lambda d: ordinary(d, 1, 4, 3, 3)),
        FLOATS,
    ),
    Case(
        "unique",
        on(
            "aten._unique2(%0) {sorted = true, return_inverse = true, return_counts = true}",
            torch.tensor([3, 1, 3, 2**40]),
            results=3,
        ),
        I64,
    ),
    Case(
        "unique_consecutive",
        on(
            "aten.unique_consecutive(%0) {return_inverse = true, return_counts = true}",
            torch.tensor([3, 3, 1, 2**40]),
            results=3,
        ),
        I64,
    ),
    Case(
        "histc",
        on("aten.histc(%0) {bins = 4, min = -1, max = 1}", lambda d: ordinary(d, 40)),
        FLOATS,
    ),
    Case("max_pool", on("aten.max_pool2d(%0) {kernel_size = [2, 2]}", _image), FLOATS),
    Case(
        "avg_pool",
        on("aten.avg_pool2d(%0) {kernel_size = [2, 2], padding = [1, 1]}", _image),
        FLOATS,
        ulps=4,
        scale=1,
    ),
    Case(
        "avg_pool1d",
        on("aten.avg_pool1d(%0) {kernel_size = [2]}", lambda d: ordinary(d, 1, 2, 6)),
        FLOATS,
        ulps=4,
        scale=1,
    ),
    Case(
        "upsample",
        on(
            "aten.upsample_nearest2d.vec(%0) {output_size = [12, 12], scale_factors = none}", _image
        ),
        FLOATS,
    ),
    Case(
        "upsample-bilinear",
        on(
            "aten.upsample_bilinear2d.vec(%0) "
            "{output_size = [9, 9], align_corners = false, scale_factors = none}",
            _image,
        ),
        FLOATS,
        ulps=8,
        scale=4,
    ),
    Case(
        "grid_sampler",
        on(
            "aten.grid_sampler(%0, %1) "
            "{interpolation_mode = 0, padding_mode = 0, align_corners = false}",
            _image,
            lambda d: ordinary(d, 1, 3, 3, 2),
        ),
        FLOATS,
        ulps=64,
        scale=4,
    ),
    Case(
        "im2col",
        on(
            "aten.im2col(%0) "
            "{kernel_size = [2, 2], dilation = [1, 1], padding = [1, 1], stride = [1, 1]}",
            _image,
        ),
        FLOATS,
    ),
    Case(
        "col2im",
        on(
            "aten.col2im(%0) {output_size = [4, 4], kernel_size = [2, 2], dilation = [1, 1], "
            "padding = [0, 0], stride = [2, 2]}",
            lambda d: ordinary(d, 1, 8, 4),
        ),
        FLOATS,
    ),
    Case("fake_quantize", on(QUANTIZED, _halves), F32),
    Case("nll_loss", on("aten.nll_loss(%0, %1)", _scores, torch.tensor([0, 3, 1])), F32, ulps=8),
    Case(
        "native_dropout",
        on("aten.native_dropout(%0) {p = 0.5, train = false}", table, results=2),
        F32,
    ),
    *[
        Case(f"{name}_window", on(f"aten.{name}_window() {{window_length = 8}}"), F32, **WINDOW)
        for name in ("hann", "hamming", "blackman")
    ],
]
