"""Whether a region computes one formula at all lengths and of all numbers.

A reading of a recurrence is confirmed on drawn numbers at a few lengths. That says something about
the others only where nothing in the region can switch: an analytic function of the operands that
agrees on drawn numbers agrees everywhere, and code that knows of no length but the chunk sizes that
were crossed does the same beyond them. So the region may hold

- of the operands only analytic functions: sums, products, exponentials, layout, and choices by
  positions; no clamp, comparison or maximum, whose other side the drawn numbers may never reach,
  no cast to fewer bits than the output has, and no summand or factor too small to show;
- a loop over chunks, whose step is such a function too, knows nothing of which one it is, and is
  affine in its state: it is the same for all states if it is for those that one chunk leaves, as
  k ⊗ v span all of them, so what agrees at three chunks, which read two states, always does;
- of positions, where the length is dynamic, only the kinds of positions.py, and no cut, shift or
  repetition along the tokens by more than one place; no table but one of a decay's powers, which
  is known whole, and no slice from a fixed place on.

At a static length positions are constants, and the comparison at that length is of all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from attngraph.analysis.recurrence.mixing import MOST, Tokens
from attngraph.analysis.recurrence.positions import Kind, Part, Positions, are_near, is_one_number
from attngraph.analysis.values.scalars import keeps_values
from attngraph.ir import Dim, Graph, Node, TensorType, Value
from attngraph.ir.dims import substitute, symbols_of
from attngraph.ir.ops import attribute
from attngraph.ir.slices import backward_slice
from attngraph.ir.traits import (
    ADDITIVE,
    ADDMM,
    CAST,
    CHOICE,
    EXPONENTIAL,
    JOIN,
    LAYOUT,
    LOGARITHM,
    MATMUL,
    MULTIPLICATIVE,
    NEGATION,
    PAD,
    PART,
    POWER,
    RANGE,
    REVERSED,
    RUNNING_SUM,
    SCALE,
    SCATTER,
    SHIFT,
    SLICE,
    SOLVE,
    SUM,
    TRIANGLE,
)

_SUMS = ADDITIVE | SHIFT | NEGATION | REVERSED
_PRODUCTS = MULTIPLICATIVE | MATMUL | ADDMM | SOLVE
_ANALYTIC = _SUMS | _PRODUCTS | SCALE | EXPONENTIAL | LOGARITHM | POWER | SUM
_OF_OPERANDS = _ANALYTIC | LAYOUT | JOIN | PAD | CAST | RUNNING_SUM | TRIANGLE | CHOICE | SCATTER
_LOOP = "attn.scan"
_CHOICE = "aten.where.self"
_CHUNKS = 3
_BEYOND = 1 << 31  # what stands for the end of an axis


def switch_in(
    output: Value, operands: Collection[Value], tokens: Tokens, tables: Collection[Value] = ()
) -> Node | None:
    """A node between the operands and the output that may compute something else of other numbers
    or at other lengths than were tried; None where there is none.

    An output that doesn't depend on all `operands` is the formula by chance, of drawn numbers that
    are all one, for instance: its own node is returned.
    """
    leaves, nodes = backward_slice([output], operands.__contains__)
    if not set(operands) <= set(leaves):
        return output.producer
    positions = Positions(tables=tables)
    for leaf in leaves:
        if leaf.is_constant:
            positions.constant(leaf)
    known = positions.parts
    entering = [leaf for leaf in leaves if leaf not in known and leaf not in operands]
    for node in nodes:
        if any(value in entering for value in node.inputs):
            return node
        is_dynamic = _is_dynamic(node, tokens)
        if is_dynamic and not _cuts_no_place(node, tokens):
            return node
        if all(value is None or value in known for value in node.inputs):
            if not is_dynamic:
                if _counts(node):
                    return node
                positions.numbers(node)
            elif not positions.take(node):
                return node
        elif node.op == _LOOP:
            if not _steps_alike(node, known, tokens, output.dtype):
                return node
        elif not _is_analytic_along(node, known, tokens, output.dtype) or not positions.admits(
            node
        ):
            return node
    return None


def _steps_alike(
    loop: Node, known: Mapping[Value, Part], tokens: Tokens, dtype: torch.dtype
) -> bool:
    """Whether each step is one function of the operands, affine in what it carries."""
    step = loop.input(attribute(loop, "carried"))
    if symbols_of(step.shape[0]) != symbols_of(tokens.dim):
        return False
    if substitute(step.shape[0], dict.fromkeys(symbols_of(tokens.dim), MOST)) < _CHUNKS:
        return False  # no trial has so many
    body: Graph = attribute(loop, "body")
    carried, scanned = attribute(loop, "carried"), attribute(loop, "scanned")
    states: set[Value] = set(body.inputs[:carried])
    inside = Positions()
    leaves, nodes = backward_slice(body.outputs, states.__contains__)
    led = _kept_once(loop, body, carried)
    for place, (value, given) in enumerate(zip(body.inputs, loop.inputs, strict=True)):
        if place < carried or given is None or given not in known or value not in leaves:
            continue
        if led and value is led[0].inputs[0]:
            continue
        part = known[given]
        is_alike = place >= carried + scanned or is_one_number(part.numbers)
        if part.kind is not Kind.NUMBERS or not is_alike:
            return False  # the number of the step, for instance
        inside.parts[value] = part
    for leaf in leaves:
        if leaf.is_constant:
            inside.constant(leaf)
    for node in nodes:
        if not isinstance(tokens.dim, int) and any(map(tokens.is_in, node.outputs)):
            return False  # of a number of tokens that is known, a size may be a state's own
        if node in led:
            states.update(node.outputs if node.op == _CHOICE else ())
            continue
        if all(value is None or value in inside.parts for value in node.inputs):
            inside.numbers(node)
        elif not is_analytic(node, inside.parts, dtype) or not inside.admits(node):
            return False
        elif any(value in states for value in node.inputs):
            if not is_affine(node, states):
                return False
            states.update(node.outputs)
    return True


def _kept_once(loop: Node, body: Graph, carried: int) -> list[Node]:
    """The nodes by which the first step leaves all states as they are, as one that counts for
    nothing does: it compares its number with the first one. Empty where there are none, or another
    node reads the number.
    """
    found: list[Node] = []
    for state, after in zip(body.inputs[:carried], body.outputs, strict=False):
        choice = after.producer
        if choice is None or choice.op != _CHOICE or choice.inputs[2] is not state:
            return []
        asked = None if choice.inputs[0] is None else choice.inputs[0].producer
        if asked is None or asked.op != "aten.ne.Scalar" or (found and asked is not found[0]):
            return []
        found += [choice] if found else [asked, choice]
    if not found:
        return []
    number = found[0].inputs[0]
    if number not in body.inputs[carried : carried + attribute(loop, "scanned")]:
        return []
    counted = loop.inputs[list(body.inputs).index(number)]
    numbers = None if counted is None else counted.producer
    if numbers is None or numbers.op not in RANGE:
        return []
    is_first = numbers.attrs.get("start", 0) == attribute(found[0], "other")
    readers = {*number.users, *found[0].outputs[0].users}
    return found if is_first and readers <= {*found} else []


def is_affine(node: Node, of: Collection[Value]) -> bool:
    """Whether an analytic node is affine in these of its inputs."""
    if node.op in MULTIPLICATIVE | MATMUL:
        is_below = "div." in node.op and node.inputs[1] in of
        return sum(value in of for value in node.inputs) == 1 and not is_below
    if node.op in SOLVE:
        return node.inputs[0] not in of
    if node.op in ADDMM:
        return not all(value in of for value in node.inputs[1:])
    return node.op in _SUMS | SCALE | SUM | LAYOUT | JOIN | CAST


def _counts(node: Node) -> bool:
    """Whether it numbers the places of another axis of unknown size."""
    return node.op in RANGE and any(symbols_of(size) for size in node.outputs[0].shape)


def _is_dynamic(node: Node, tokens: Tokens) -> bool:
    """Whether the number of tokens, which isn't known, is among a node's sizes."""
    if isinstance(tokens.dim, int):
        return False
    sizes = (*node.inputs, *node.outputs)
    return any(value is not None and tokens.is_in(value) for value in sizes)


def _is_analytic_along(
    node: Node, fixed: Collection[Value], tokens: Tokens, dtype: torch.dtype
) -> bool:
    """`is_analytic`, of which along the tokens no place is written to."""
    if node.op in SCATTER and _is_dynamic(node, tokens):
        source = node.source
        by_tensor = any(not _is_float(value) for value in node.inputs)
        if by_tensor or "dim" not in node.attrs:
            return False
        if _has(source.shape[attribute(node, "dim")], tokens):
            return False
    return is_analytic(node, fixed, dtype)


def is_analytic(node: Node, fixed: Collection[Value], dtype: torch.dtype) -> bool:
    """Whether a node is an analytic function of its inputs but `fixed` ones, give or take what
    numbers of this dtype are rounded by."""
    if node.op not in _OF_OPERANDS:
        return False
    if node.op in CAST:
        is_of_floats = all(_is_float(value) for value in (*node.inputs, *node.outputs))
        return is_of_floats and keeps_values(dtype, node.output.dtype)
    if node.op in CHOICE:
        at = 1 if "masked_fill" in node.op else 0
        return node.inputs[at] in fixed
    if node.op in SCATTER:  # by places that are fixed
        return all(_is_float(v) or v in fixed for v in node.inputs if v is not None)
    return True


def _cuts_no_place(node: Node, tokens: Tokens) -> bool:
    """Whether no fixed place along the tokens is cut or moved, but the first or the last.

    A size such as 100·s is an axis of tokens that was repeated, or merged with another one: what
    reads its first s places reads other tokens from some length on.
    """
    shapes = [value.shape for value in node.outputs if isinstance(value.type, TensorType)]
    sizes = [size for shape in shapes for size in shape if _has(size, tokens)]
    if not are_near(*map(tokens.counted, sizes)):
        return False
    source = node.inputs[0] if node.inputs else None
    if source is None or not isinstance(source.type, TensorType):
        return True
    if node.op in TRIANGLE:
        return are_near(attribute(node, "diagonal"))
    if node.op in PAD:
        amounts = attribute(node, "pad")
        along = [at for at, size in enumerate(reversed(source.shape)) if _has(size, tokens)]
        return all(are_near(amounts[2 * at : 2 * at + 2]) for at in along)
    if node.op in JOIN:
        return _joins_no_place(node, tokens)
    if node.op in PART:
        dim = attribute(node, "dim")
        cuts = [each for name, each in node.attrs.items() if name not in ("dim", "step")]
        if not _has(source.shape[dim], tokens):
            return True
        step = attribute(node, "step") if node.op in SLICE and "narrow" not in node.op else 1
        return step == 1 and are_near(*filter(_is_inside, cuts))
    return True


def _joins_no_place(node: Node, tokens: Tokens) -> bool:
    """Whether what is joined to tokens is at most one place."""
    if node.outputs[0].shape[attribute(node, "dim")] == len(node.inputs):
        return True  # stacked, along an axis of its own
    dim = attribute(node, "dim")
    sizes = [value.shape[dim] for value in node.inputs if value is not None]
    along = any(_has(size, tokens) for size in sizes)
    return not along or all(_has(size, tokens) or are_near(size) for size in sizes)


def _is_inside(cut: object) -> bool:
    return not (isinstance(cut, int) and cut >= _BEYOND)


def _has(size: Dim, tokens: Tokens) -> bool:
    return bool(symbols_of(size) & symbols_of(tokens.dim))


def _is_float(value: Value | None) -> bool:
    is_tensor = value is not None and isinstance(value.type, TensorType)
    return is_tensor and value is not None and value.dtype.is_floating_point
