"""A sample of other sizes, for code that takes a path of its own at the given sample's.

`if table.shape[-1] >= n` takes what an earlier call left for the sample's size, and `if size ==
self.input_resolution` a mask that was made for it. The other side often computes the same for every
size. At twice the size a trace follows that side; whether it is the model at the sample's own size,
which that side excludes, is tried here, and by the check as of any other size. Where the sample is
a multiple of a block, `if pad > 0` leaves the padding out; beside it a trace follows it, by nothing
where there is nothing to pad.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from enum import Enum, auto
from functools import partial
from io import StringIO
from operator import add
from types import FrameType
from typing import Any, TypeAlias

import sympy
import torch
from torch.export import ExportedProgram
from torch.func import functional_call
from torch.utils import _pytree as pytree

from attngraph.frontend.interface.shapes import Request
from attngraph.frontend.rewording.cut_for_memory import Whole, keeps_rows_apart
from attngraph.frontend.rewording.rounded_for_speed import Function, left_out, stood_in
from attngraph.frontend.sizes.program_dims import user_placeholders
from attngraph.frontend.watching.asked import Place
from attngraph.frontend.watching.frames import watched_frames
from attngraph.inference import inference

Inputs: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]

Longer: TypeAlias = tuple[Callable[[int], int], ...]
TWICE: Longer = (lambda n: 2 * n, lambda n: 2 * n + 1)
"""As long, or one more, which is no multiple of what the sample may be."""
BY_A_FEW: Longer = (lambda n: n + 1, lambda n: n + 2)
"""For a sample that is a multiple of a number."""
_SMALLER: tuple[Callable[[int], int], ...] = (
    lambda size: size,
    lambda size: -(-size // 2),
    lambda size: min(size, 2),
)
_MORE = (0, 1, 2, 3, 5, -1)
"""Sizes beyond the sample's at which something is left out; at two of them it must be there."""
_ROUNDING = 2
_LARGE = (-30.0, 30.0)
_WITHOUT_RESULT = (torch.ops.aten._assert_scalar.default, torch.ops.aten.copy_.default)
"""Demands on sizes, and what is kept for a next call."""
_RELATIVE, _ABSOLUTE = 1e-3, 1e-4
"""Distances of a trace from its model in their own dtype; the check compares in float64."""


class Extent(Enum):
    """Sizes: the sample's own, and smaller ones too."""

    NONE = auto()
    SAMPLE = auto()
    ALL = auto()


def beyond(end: int) -> Longer:
    """For a trace that ends at a size, as where there is one block."""
    return (lambda _: end + 1,)


def amid_blocks(sizes: Collection[int]) -> Longer:
    """For a trace of blocks of which the last may be shorter: several whole ones of each size, and
    a part of as far from one row as from a whole block.
    """
    most = max(sizes, default=0)
    tried = [length for length in range(2 * most + 2, 4 * most + 2) if is_amid(length, sizes)]
    return (partial(_fixed, max(tried, key=partial(_apart, sizes))),) if tried else ()


def is_amid(length: int, sizes: Collection[int]) -> bool:
    """Whether a length is of several blocks of each size and a part, of two rows or more."""
    return length >= 2 * max(sizes, default=0) + 2 and _apart(sizes, length) > 0


def _apart(sizes: Collection[int], length: int) -> int:
    return min(min(length % size - 1, size - length % size) for size in sizes)


def _fixed(size: int, _: int) -> int:
    return size


def other_samples(
    module: torch.nn.Module,
    sample: Inputs,
    requests: Sequence[Request],
    constant: Sequence[Request],
    longer: Longer,
) -> Iterator[Inputs]:
    """Samples with each dim longer that has the size of one which became constant.

    Left out are those that the model doesn't take, or that lie beyond the ends asked for.
    """
    sizes = {request.size for request in constant}
    longer_ones = [request for request in requests if request.size in sizes]

    def fits(to: Callable[[int], int]) -> bool:
        return all(each.high is None or to(each.size) <= each.high for each in longer_ones)

    for to in [each for each in longer if fits(each)] or filter(fits, BY_A_FEW):
        inputs = resized(sample, longer_ones, to)
        if output_of(module, inputs) is not None:
            yield inputs


def comes_to(module: torch.nn.Module, inputs: Inputs, place: Place) -> bool:
    """Whether the model runs a line of its code on these inputs."""
    file, line = place
    came = False

    def within(frame: FrameType, event: str, _: object) -> Any:
        nonlocal came
        came = came or frame.f_lineno == line
        return None if came else within

    def entered(frame: FrameType, event: str, _: object) -> Any:
        return within if frame.f_code.co_filename == file and not came else None

    with watched_frames(entered):
        output_of(module, inputs)
    return came


def is_model(
    program: ExportedProgram,
    module: torch.nn.Module,
    sample: Inputs,
    constant: Sequence[Request],
) -> Extent:
    """At which sizes a program that was traced at others is the model.

    Smaller ones are tried where the trace excludes them all, and the model takes them.
    """
    own: Any = getattr(program, "module")(check_guards=False)  # noqa: B009
    own._forward_pre_hooks.clear()  # what the trace demands of the sizes
    least = [_least(program, request) for request in constant]
    if None in least:
        return Extent.NONE
    excludes = any(low > r.size for low, r in zip(least, constant, strict=True) if low is not None)
    for node in reversed(list(own.graph.nodes)):
        if node.target in _WITHOUT_RESULT and not node.users and not _matters(node):
            own.graph.erase_node(node)
    own.recompile()
    for place, smaller in enumerate(_SMALLER):
        inputs = resized(sample, constant, smaller)
        expected = output_of(module, inputs)
        if expected is None and place:
            continue
        if expected is None or not _same(output_of(own, inputs), expected):
            return Extent.SAMPLE if place else Extent.NONE
        if not excludes:
            break
    return Extent.ALL


def is_model_beyond(
    program: ExportedProgram, module: torch.nn.Module, sample: Inputs, requests: Sequence[Request]
) -> bool:
    """The same at one size more of each dim, as far as the model takes that."""
    roots = [each for each in requests if each.name == each.root and each.high != each.size]
    longer = resized(sample, roots, BY_A_FEW[0])
    fails = output_of(module, longer) is None
    return fails or is_model(program, module, longer, ()) is not Extent.NONE


def is_rounded_for_speed(
    module: torch.nn.Module,
    sample: Inputs,
    requests: Sequence[Request],
    functions: Sequence[Function],
) -> bool:
    """Whether a model computes the same where functions that round these dims' sizes don't."""

    def without(inputs: Inputs) -> tuple[list[torch.Tensor] | None, bool]:
        rounds: list[int] = []
        with stood_in(functions, left_out(rounds)):
            return output_of(module, inputs), bool(rounds)

    return _is_same(module, sample, requests, without)


def is_cut_for_memory(
    module: torch.nn.Module,
    sample: Inputs,
    requests: Sequence[Request],
    places: Collection[Place],
) -> bool:
    """Whether a model computes the same where these places don't cut an axis into parts, and what
    is done with the parts keeps rows apart.
    """
    cutting: list[Inputs] = []

    def without(inputs: Inputs) -> tuple[list[torch.Tensor] | None, bool]:
        with Whole(places) as mode:
            found = output_of(module, inputs)
        cutting.extend([inputs] * (mode.cut > 0))
        return found, mode.cut > 0

    if not _is_same(module, sample, requests, without):
        return False
    return keeps_rows_apart(lambda: output_of(module, cutting[-1]), places)


def _is_same(
    module: torch.nn.Module,
    sample: Inputs,
    requests: Sequence[Request],
    without: Callable[[Inputs], tuple[list[torch.Tensor] | None, bool]],
) -> bool:
    """Whether a model's outputs are those `without` something, which also says if it was there.

    It is tried at the sample's sizes and at others, at two of which it has to be, and there on
    large numbers of either sign too: what is padded with zeros shows beside these.
    """
    counted = 0
    for more in _MORE:
        inputs = resized(sample, requests, partial(add, more))
        expected = output_of(module, inputs)
        if expected is None and more:
            continue
        found, was_there = without(inputs)
        if expected is None or not _same(found, expected):
            return False
        counted += was_there
        for number in _LARGE if was_there else ():
            changed = pytree.tree_map(partial(_of_sign, number), inputs)
            expected = output_of(module, changed)
            if expected is not None and not _same(without(changed)[0], expected):
                return False
    return counted >= _ROUNDING


def _of_sign(number: float, leaf: Any) -> Any:
    is_float = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    return number * (1 + leaf.abs()) if is_float else leaf


def _least(program: ExportedProgram, request: Request) -> int | None:
    """The least size of a dim in a trace; None where it takes a single one."""
    size = user_placeholders(program)[request.leaf].meta["val"].shape[request.axis]
    is_open = isinstance(size, torch.SymInt)
    bounds = program.range_constraints.get(size.node.expr) if is_open else None
    if bounds is None or bounds.lower == bounds.upper:
        return None
    return int(bounds.lower)


def _matters(node: torch.fx.Node) -> bool:
    """Whether an assertion of a trace holds sizes equal, which no other sizes may break, or what is
    copied goes into a tensor that the trace makes, or that it reads afterwards."""
    of: Any = node.args[0]
    if node.target is torch.ops.aten.copy_.default:
        while _is_view(of):
            of = of.args[0]
        return bool(of.op == "call_function") or any(
            each > node for view in _views_of(of) for each in view.users
        )
    value = of.meta.get("val") if isinstance(of, torch.fx.Node) else None
    return isinstance(value, torch.SymBool) and isinstance(value.node.expr, sympy.Eq)


def _is_view(node: torch.fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and bool(target._schema.returns[0].alias_info)


def _views_of(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """A tensor of a trace, and what shares its memory."""
    yield node
    for user in node.users:
        if _is_view(user) and user.args and user.args[0] is node:
            yield from _views_of(user)


def resized(inputs: Inputs, requests: Sequence[Request], to: Callable[[int], int]) -> Inputs:
    """Inputs with these dims repeated or cut to another size, in memory of their own: a trace asks
    how a part of something larger lies in it.
    """
    leaves, structure = pytree.tree_flatten(inputs)
    for request in requests:
        leaf, size = leaves[request.leaf], to(request.size)
        copies = [leaf] * -(-size // request.size)
        part = torch.cat(copies, request.axis).narrow(request.axis, 0, size)
        leaves[request.leaf] = part.contiguous()
    made: Inputs = pytree.tree_unflatten(leaves, structure)
    return made


@contextmanager
def _levels_kept() -> Iterator[None]:
    """A trace has the ends of a torch.vmap as nodes: if one between them fails, torch remains
    within it, for good, and any random number is an error there.
    """
    before = _level()
    try:
        yield
    finally:
        while _level() > before:
            torch._C._functorch._vmap_decrement_nesting()


def _level() -> int:
    innermost = torch._C._functorch.peek_interpreter_stack()
    return 0 if innermost is None else innermost.level()


def output_of(module: torch.nn.Module, inputs: Inputs) -> list[torch.Tensor] | None:
    """The tensors that the model returns, or None where it fails: torch.fx prints why."""
    args, kwargs = pytree.tree_map(
        lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, inputs
    )
    try:
        with (
            _levels_kept(),
            inference(module),
            torch.random.fork_rng(devices=[]),
            redirect_stderr(StringIO()),
        ):
            torch.manual_seed(0)
            buffers = {name: each.detach().clone() for name, each in module.named_buffers()}
            return list(_tensors(functional_call(module, buffers, args, kwargs)))
    except Exception:
        return None


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor))


def _same(found: Sequence[torch.Tensor] | None, expected: Sequence[torch.Tensor]) -> bool:
    return (
        found is not None
        and len(found) == len(expected)
        and all(
            a.shape == b.shape
            and torch.allclose(a, b.to(a.dtype), _RELATIVE, _ABSOLUTE, equal_nan=True)
            for a, b in zip(found, expected, strict=True)
        )
    )
