"""What is provable about one attention site: all that the kernel table may ask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import sympy
import torch

from attngraph.analysis.masks.masking import masking_of, scores_shape
from attngraph.export.kernels.prologue import prologue_of
from attngraph.ir import Node
from attngraph.ir.dims import DimInfo, bounds, divide, same
from attngraph.ir.ops import attribute, input_of, inputs_of

# What an op must take besides query, key and value, and what some compute before.
CAUSAL, WINDOW, LENGTHS, BOOL, BIAS, SOFTCAP, SINKS, ROW_SINKS, WEIGHTS, PAST, STATIC, PACKED = (
    "causal",
    "window",
    "lengths",
    "bool mask",
    "float bias",
    "softcap",
    "sinks",
    "sinks of each query",
    "returned weights",
    "past",
    "static cache",
    "packed rows",
)
EMPTY = (
    "selections that may be empty"  # no queries or keys, by what only a run tells, or none at all
)
ROTARY, NORMS = "rotary embedding", "norms of each head"
ATTENTION = "attn.attention"
PACKED_ATTENTION = "attn.packed_attention"


@dataclass(frozen=True)
class Facts:
    """One site (B, S, H, D) × (B, T, G, D), with values of size E.

    Sizes that aren't numbers are ranges (least, greatest or None); a bool is None where it can't be
    proved either way. `mean_rows` says that a query may have no key and then gets the mean of
    all values, also of those that causality forbids. `rotary_features` is the number of features of
    each head that a rotary embedding rotates right before the attention, in query and key alike, by
    tables that all elements of the batch share; `normed` says that norms of each head precede it.
    """

    dtype: torch.dtype
    heads: int
    groups: int
    head_size: int | None
    value_size: int | None
    batch: tuple[int, int | None]
    queries: tuple[int, int | None]
    keys: tuple[int, int | None]
    square: bool | None
    aligned_keys: bool | None
    features: frozenset[str]
    positive_scale: bool
    mean_rows: bool = False
    window: int = 0
    rotary_features: int | None = None
    normed: bool = False

    @property
    def traits(self) -> frozenset[str]:
        """The features, and the prologue of query and key."""
        before = {ROTARY} if self.rotary_features is not None else set()
        return self.features | before | ({NORMS} if self.normed else set())

    @property
    def signature(self) -> str:
        """Equal for sites that any kernel treats alike."""
        sizes = f"B{_text(self.batch)} S{_text(self.queries)} T{_text(self.keys)}"
        shape = f"H{self.heads} G{self.groups} D{self.head_size} E{self.value_size}"
        masks = ", ".join(sorted(self.features)) or "unmasked"
        dtype = str(self.dtype).removeprefix("torch.")
        square = {True: "S=T", False: "S≠T", None: "S?T"}[self.square]
        rows = " mean rows" if self.mean_rows else ""
        scale = "" if self.positive_scale else " scale ≤ 0"
        window = f" W{self.window}" if self.window else ""
        before = f" R{self.rotary_features}{' normed' * self.normed}"
        before = "" if self.rotary_features is None else before
        return f"{dtype} {sizes} {shape} {square} {masks}{rows}{scale}{window}{before}"


def facts_of(node: Node, dims: Mapping[str, DimInfo], *, static: bool = False) -> Facts:
    """The facts of an attention, packed or not, of a graph with these dims.

    `static` says that a past lies in a buffer which has room for what is new.
    """
    query, value = inputs_of(node, "query", "value")
    heads, groups = attribute(node, "heads"), attribute(node, "kv_heads")
    of_site = partial(
        Facts,
        dtype=query.dtype,
        heads=heads,
        groups=groups,
        head_size=_whole(divide(query.shape[2], heads)),
        value_size=_whole(divide(value.shape[2], groups)),
        positive_scale=attribute(node, "scale") > 0,
    )
    if node.op == PACKED_ATTENTION:  # that over padded rows which it stands for
        batch, length = (bounds(dim, dims) for dim in input_of(node, "kept").shape)
        return of_site(
            batch=batch,
            queries=length,
            keys=length,
            square=True,
            aligned_keys=None,  # nothing asks: the padding is a number of keys, and no mask
            features=frozenset({PACKED}),
        )
    masking, past = masking_of(node), input_of(node, "past_key")
    _, _, queries, keys = scores_shape(node)
    spans = bounds(queries, dims), bounds(keys, dims)
    sinks, prologue = input_of(node, "sinks"), prologue_of(node)
    present = {
        CAUSAL: masking.causal,
        BOOL: masking.mask is not None,
        BIAS: masking.bias is not None,
        SOFTCAP: attribute(node, "softcap") > 0,
        WINDOW: masking.window > 0,
        LENGTHS: masking.lengths is not None,
        SINKS: sinks is not None,
        ROW_SINKS: sinks is not None and len(sinks.shape) != 1,
        WEIGHTS: attribute(node, "weights"),
        PAST: past is not None,
        STATIC: past is not None and static,
        EMPTY: any(
            isinstance(size, (sympy.Symbol, int)) and least < 1
            for size, (least, _) in zip((queries, keys), spans, strict=True)
        ),
    }
    return of_site(
        batch=bounds(query.shape[0], dims),
        queries=spans[0],
        keys=spans[1],
        square=True if same(queries, keys) else _apart(*spans),
        aligned_keys=keys % 4 == 0
        if isinstance(keys, int)
        else (True if divide(keys, 4) is not None else None),
        features=frozenset(name for name, there in present.items() if there),
        mean_rows=masking.masked_rows == "mean" and bool(masking.values),
        window=masking.window,
        rotary_features=None if prologue is None else prologue.width,
        normed=prologue is not None and prologue.norms is not None,
    )


def _whole(size: object) -> int | None:
    return size if isinstance(size, int) else None


def _apart(a: tuple[int, int | None], b: tuple[int, int | None]) -> bool | None:
    """False where the ranges don't meet, else unknown."""
    meet = (b[1] is None or a[0] <= b[1]) and (a[1] is None or b[0] <= a[1])
    return None if meet else False


def _text(span: tuple[int, int | None]) -> str:
    low, high = span
    return str(low) if low == high else f"{low}..{'' if high is None else high}"
