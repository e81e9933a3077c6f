"""Shapes with unknown sizes: products, attentions and convolutions, whose operands share axes."""

from __future__ import annotations

from collections.abc import Sequence

import sympy

from attngraph.analysis.layout.shape_reader import Reader, Rules, Shape
from attngraph.ir import Dim, Node, Value
from attngraph.ir.dims import as_dim, product
from attngraph.ir.ops import attribute, input_of, inputs_of

PRODUCTS = Rules()


@PRODUCTS.on("aten.matmul", "aten.mm", "aten.bmm")
def _matmul(reader: Reader, node: Node) -> Sequence[Shape] | None:
    left, right = (reader.shape(value) for value in node.inputs)
    if len(left) < 2 or len(right) < 2:
        return None
    return _product(reader, left, right)


def _product(reader: Reader, left: Shape, right: Shape) -> Sequence[Shape] | None:
    reader.sizes.unify(left[-1], right[-2])
    lead = reader.broadcast([left[:-2], right[:-2]], max(len(left), len(right)) - 2)
    return None if lead is None else [(*lead, left[-2], right[-1])]


@PRODUCTS.on("aten.linear")
def _linear(reader: Reader, node: Node) -> Sequence[Shape] | None:
    source, weight = reader.of(node, "input"), reader.of(node, "weight")
    reader.sizes.unify(source[-1], weight[-1])
    if input_of(node, "bias") is not None:
        reader.sizes.unify(weight[0], reader.of(node, "bias")[0])
    return [(*source[:-1], weight[0])]


@PRODUCTS.on("aten.addmm", "aten.baddbmm")
def _addmm(reader: Reader, node: Node) -> Sequence[Shape] | None:
    added, left, right = (reader.shape(value) for value in node.inputs)
    found = _product(reader, left, right)
    if found is None or len(added) > len(found[0]):
        return None
    whole = reader.broadcast([found[0], added], len(found[0]))
    return None if whole is None else [whole]


@PRODUCTS.on("aten.einsum")
def _einsum(reader: Reader, node: Node) -> Sequence[Shape] | None:
    terms, _, result = attribute(node, "equation").replace(" ", "").partition("->")
    if "." in terms or not result:
        return None
    sizes: dict[str, Dim] = {}
    for labels, value in zip(terms.split(","), node.inputs, strict=True):
        for label, dim in zip(labels, reader.shape(value), strict=True):
            if reader.sizes.number(sizes.get(label, 1)) == 1:
                sizes[label] = dim
            elif reader.sizes.number(dim) != 1:
                reader.sizes.unify(sizes[label], dim)
    return [tuple(sizes[label] for label in result)]


@PRODUCTS.on("aten.scaled_dot_product_attention")
def _sdpa(reader: Reader, node: Node) -> Sequence[Shape] | None:
    query, key, value = (reader.of(node, name) for name in ("query", "key", "value"))
    sizes = reader.sizes
    sizes.unify(query[-1], key[-1])
    sizes.unify(key[-2], value[-2])
    for place in range(len(query) - 2):
        if sizes.number(query[place]) == sizes.number(key[place]):
            sizes.unify(query[place], key[place])
        if sizes.number(key[place]) == sizes.number(value[place]):
            sizes.unify(key[place], value[place])
    if input_of(node, "attn_mask") is not None:
        scores = (*query[:-1], key[-2])
        if reader.broadcast([scores, reader.of(node, "attn_mask")], len(scores)) is None:
            return None
    return [(*query[:-1], value[-1])]


@PRODUCTS.on("attn.attention")
def _attention(reader: Reader, node: Node) -> Sequence[Shape] | None:
    query, key, value = (reader.of(node, name) for name in ("query", "key", "value"))
    heads, kv_heads = attribute(node, "heads"), attribute(node, "kv_heads")
    sizes = reader.sizes
    head, out = (sizes.fresh(sizes.number(shape[-1]) // kv_heads) for shape in (key, value))
    sizes.unify(query[-1], product([heads, head]))
    sizes.unify(key[-1], product([kv_heads, head]))
    sizes.unify(value[-1], product([kv_heads, out]))
    for other in (key, value):
        sizes.unify(query[0], other[0])
    sizes.unify(key[1], value[1])
    keys, rest = key[1], list[Shape]()
    if input_of(node, "past_key") is not None:
        pasts = [reader.of(node, name) for name in ("past_key", "past_value")]
        for past, width in zip(pasts, (head, out), strict=True):
            sizes.unify(past[0], query[0])
            sizes.unify(past[1], kv_heads)
            sizes.unify(past[2], pasts[0][2])
            sizes.unify(past[3], width)
        keys = as_dim(sympy.expand(sympy.sympify(keys) + pasts[0][2]))
        rest = [(query[0], kv_heads, keys, width) for width in (head, out)]
    scores = (query[0], heads, query[1], keys)
    for name in ("bias", "mask"):
        if input_of(node, name) is not None:
            shape = reader.of(node, name)
            if len(shape) > 4 or reader.broadcast([scores, shape], 4) is None:
                return None
    for name in ("sinks", "lengths"):
        if input_of(node, name) is not None:
            sizes.pin(list(reader.of(node, name)))
    weights = [scores] if attribute(node, "weights") else []
    return [(*query[:2], sizes.joined([heads, out])), *weights, *rest]


@PRODUCTS.on("attn.linear_attention")
def _linear_attention(reader: Reader, node: Node) -> Sequence[Shape] | None:
    query, key, value = (reader.of(node, name) for name in ("query", "key", "value"))
    heads, kv_heads = attribute(node, "heads"), attribute(node, "kv_heads")
    sizes = reader.sizes
    head, out = _feature(reader, key, kv_heads), _feature(reader, value, kv_heads)
    sizes.unify(_feature(reader, query, heads), head)
    state = (query[0], kv_heads, head, out)
    _unify_over_time(reader, node, query, [key, value], state, inputs_of(node, "decay", "beta"))
    return [(*query[:2], sizes.joined([max(heads, kv_heads), out])), state]


@PRODUCTS.on("attn.generalized_delta_rule")
def _generalized_delta_rule(reader: Reader, node: Node) -> Sequence[Shape] | None:
    heads, sizes = attribute(node, "heads"), reader.sizes
    query, value = reader.of(node, "query"), reader.of(node, "value")
    head, out = _feature(reader, query, heads), _feature(reader, value, heads)
    vectors = [reader.of(node, name) for name in ("key", "a", "b")]
    for shape in vectors:
        sizes.unify(_feature(reader, shape, heads), head)
    state = (query[0], heads, head, out)
    _unify_over_time(reader, node, query, [*vectors, value], state, inputs_of(node, "decay"))
    return [value, state]


def _unify_over_time(
    reader: Reader,
    node: Node,
    query: Shape,
    others: Sequence[Shape],
    state: Shape,
    rates: Sequence[Value | None],
) -> None:
    """Batch and tokens are those of the query; rates are numbers of each head, or of each feature.

    A past state has the axes (batch, heads, features, features of values) of the new one.
    """
    sizes, (_, heads, head, _) = reader.sizes, state
    given = [reader.shape(rate) for rate in rates if rate is not None]
    for shape in (*others, *given):
        for first, second in zip(query[:2], shape[:2], strict=True):
            sizes.unify(first, second)
    for shape in given:
        of_heads = sizes.number(shape[-1]) == heads
        sizes.unify(_feature(reader, shape, heads), 1 if of_heads else head)
    if input_of(node, "past") is not None:
        for first, second in zip(reader.of(node, "past"), state, strict=True):
            sizes.unify(first, second)


def _feature(reader: Reader, shape: Shape, heads: int) -> Dim:
    """The features of one head, where the last axis holds those of all heads."""
    count = reader.sizes.number(shape[-1])
    first, features = reader.sizes.regrouped(shape[-1:], (heads, count // heads))
    reader.sizes.unify(first, heads)
    return features


@PRODUCTS.on("attn.masked_softmax")
def _masked_softmax(reader: Reader, node: Node) -> Sequence[Shape] | None:
    logits = reader.of(node, "logits")
    given = [reader.shape(value) for value in node.inputs[1:3] if value is not None]
    scores = node.inputs[0]
    if scores is None or attribute(node, "past"):
        return None
    # Both sides of a comparison read one tensor of scores, of as many queries.
    if scores not in reader.queries:
        reader.queries[scores] = reader.sizes.fresh(attribute(node, "queries"))
    queries = reader.queries[scores]
    rows = [(*logits[:2], queries, logits[3]), *given]
    if input_of(node, "lengths") is not None:
        rows.append((*reader.of(node, "lengths"), 1, 1, 1))
    found = reader.broadcast(rows, 4)
    reader.set(node, queries=queries)
    return None if found is None else [(*found[:2], *logits[2:])]


@PRODUCTS.on("attn.rotary")
def _rotary(reader: Reader, node: Node) -> Sequence[Shape] | None:
    x, cos, sin = (reader.of(node, name) for name in ("x", "cos", "sin"))
    reader.sizes.pin([x[-1], cos[-1], sin[-1]])
    rows = reader.broadcast([x[:-1], cos[:-1], sin[:-1]], len(x) - 1)
    return None if rows is None else [(*rows, x[-1])]


@PRODUCTS.on("aten.conv2d")
def _patches(reader: Reader, node: Node) -> Sequence[Shape] | None:
    """A convolution whose steps are as wide as its kernel: each patch by itself."""
    image, weight = reader.of(node, "input"), reader.of(node, "weight")
    kernel = [reader.sizes.number(dim) for dim in weight[2:]]
    reader.sizes.pin(list(weight))
    stride, padding = attribute(node, "stride"), attribute(node, "padding")
    plain = list(stride) == kernel and not any(padding) and attribute(node, "groups") == 1
    if not plain or list(attribute(node, "dilation")) != [1] * len(kernel):
        return None
    found = []
    for dim, step in zip(image[2:], kernel, strict=True):
        count = reader.sizes.number(dim) // step
        if count * step != reader.sizes.number(dim):
            return None
        part = reader.sizes.fresh(count)
        reader.sizes.unify(dim, product([part, step]))
        found.append(part)
    reader.sizes.unify(image[1], weight[1])
    return [(image[0], weight[0], *found)]


@PRODUCTS.on("aten.conv1d")
def _channelwise(reader: Reader, node: Node) -> Sequence[Shape] | None:
    """A convolution of each channel over time, of which there may be any number."""
    x, weight = reader.of(node, "input"), reader.of(node, "weight")
    padding = attribute(node, "padding")
    if len(x) != 3 or list(attribute(node, "stride")) != [1]:
        return None
    if attribute(node, "groups") != reader.sizes.number(x[1]):
        return None
    channels = _channels(reader, node, x, weight)
    reader.set(node, groups=channels)
    reach = (reader.sizes.number(weight[2]) - 1) * attribute(node, "dilation")[0]
    length = as_dim(sympy.expand(sympy.sympify(x[2]) + 2 * padding[0] - reach))
    return [(x[0], channels, length)]


@PRODUCTS.on("attn.causal_conv")
def _causal_conv(reader: Reader, node: Node) -> Sequence[Shape] | None:
    x, weight = reader.of(node, "x"), reader.of(node, "weight")
    channels = _channels(reader, node, x, weight)
    if input_of(node, "past") is not None:
        past = reader.of(node, "past")
        reader.sizes.unify(past[0], x[0])
        reader.sizes.unify(past[1], channels)
        reader.sizes.pin(past[2])
    reach = (reader.sizes.number(weight[2]) - 1) * attribute(node, "dilation")
    return [x, (x[0], channels, reach)]


def _channels(reader: Reader, node: Node, x: Shape, weight: Shape) -> Dim:
    """The channels of x, each of which has a kernel of its own. Raises ValueError otherwise."""
    if reader.sizes.number(weight[0]) != reader.sizes.number(x[1]):
        raise ValueError
    reader.sizes.unify(x[1], weight[0])
    reader.sizes.pin(list(weight[1:]))
    if input_of(node, "bias") is not None:
        reader.sizes.unify(reader.of(node, "bias")[0], x[1])
    return x[1]
