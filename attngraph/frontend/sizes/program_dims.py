"""The dims of an exported program, and names for them: it doesn't keep those its author gave."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import sympy
import torch
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols
from torch.utils._sympy.functions import FloorDiv, Mod

from attngraph.errors import UsageError
from attngraph.frontend.interface.shapes import Request
from attngraph.ir.conditions import at_sizes

_TRIED = 1 << 11
"""Sizes beyond the sample's at which a demand is tried; a wave is cut into frames of hundreds."""
_SOME = 32
"""Sizes on each side of the sample's, at which what a trace demands of a derived dim is tried."""
_LONGEST = 32
"""Times the sample, up to which a size is looked at beyond an end that the trace has."""


def user_placeholders(program: ExportedProgram) -> list[torch.fx.Node]:
    """The nodes of the model's own inputs, tensors or not, in order."""
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    return placeholders[len(placeholders) - len(program.graph_signature.user_inputs) :]


def shape_env(program: ExportedProgram) -> ShapeEnv | None:
    """What torch knows of the sizes of a program that this process traced."""
    for node in user_placeholders(program):
        value = node.meta.get("val")
        for size in value.shape if isinstance(value, torch.Tensor) else ():
            if isinstance(size, torch.SymInt):
                env: ShapeEnv | None = size.node.shape_env
                return env
    return None


def named_symbols(
    program: ExportedProgram, names: Mapping[tuple[str, int], str]
) -> dict[sympy.Symbol, str]:
    """The program's symbols by the name that was given to an axis of an input.

    Raises UsageError where an axis is unknown, fixed or computed, or where names and dims are not
    one to one.
    """
    inputs = {node.name: node.meta.get("val") for node in user_placeholders(program)}
    found: dict[sympy.Symbol, str] = {}
    owners: dict[str, tuple[sympy.Symbol, str]] = {}
    for (owner, axis), name in names.items():
        what = f"--dim {name}={owner}:{axis}"
        if not isinstance(value := inputs.get(owner), torch.Tensor):
            known = ", ".join(n for n, v in inputs.items() if isinstance(v, torch.Tensor))
            raise UsageError(f"{what}: the program has no tensor input {owner}; it has {known}.")
        if axis >= value.ndim:
            raise UsageError(f"{what}: {owner} has {value.ndim} axes, counted from 0.")
        size = value.shape[axis]
        expr = size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
        if not isinstance(expr, sympy.Symbol):
            why = f"is fixed to {size}" if expr.is_number else "is computed from another dim"
            raise UsageError(
                f"{what}: that axis {why} in the program; name another, or export the model again "
                "with that axis dynamic."
            )
        if found.setdefault(expr, name) != name:
            raise UsageError(f"{what}: the program has one dim for it and {found[expr]}; name one.")
        first, where = owners.setdefault(name, (expr, f"{owner}:{axis}"))
        if first != expr:
            raise UsageError(
                f"{what}: the program doesn't require it to equal {where}; give it a name of its "
                "own, or export the model again with one Dim for both."
            )
    return found


def open_sizes(
    program: ExportedProgram, asked: Iterable[Request]
) -> Iterator[tuple[Request, sympy.Basic | None]]:
    """The dims with their sizes in a program's symbols, None for one that became a constant."""
    placeholders = user_placeholders(program)
    for request in asked:
        size = placeholders[request.leaf].meta["val"].shape[request.axis]
        yield request, size.node.expr if isinstance(size, torch.SymInt) else None


def is_held(program: ExportedProgram, request: Request) -> bool:
    """Whether a trace holds a derived dim, such as `4 * blocks`, at the sample's size.

    torch asks of such a dim whether its range fits, and not whether what the trace demands does:
    `for i in range(n // 4)` is unrolled, for n // 4 = 3, and n is called open.
    """
    (placed,) = (size for _, size in open_sizes(program, [request]))
    env = shape_env(program)
    if placed is None or env is None or request.name == request.root:
        return False
    if len(placed.free_symbols) != 1:
        return False
    (root,) = placed.free_symbols
    exprs = [guard.expr for guard in env.guards]
    known = {
        each.lhs: each.rhs
        for each in exprs
        if isinstance(each, sympy.Eq) and each.lhs.is_Symbol and each.rhs.free_symbols == {root}
    }
    demands = [
        each for each in (expr.xreplace(known) for expr in exprs) if each.free_symbols == {root}
    ]
    bounds = program.range_constraints.get(root)

    def is_excluded(size: int) -> bool:
        if bounds is not None and not bounds.lower <= size <= bounds.upper:
            return True
        return any(at_sizes(each, {root: sympy.Integer(size)}) == sympy.false for each in demands)

    (own_size,) = sympy.solve(placed - request.size, root)
    near = range(max(int(own_size) - _SOME, 1), int(own_size) + _SOME)
    given = {size: int(placed.xreplace({root: sympy.Integer(size)})) for size in near}
    low, high = request.low or 1, request.high
    others = [
        size
        for size, own in given.items()
        if own != request.size and low <= own and (high is None or own <= high)
    ]
    return bool(others) and all(map(is_excluded, others))


def gives_parts(program: ExportedProgram) -> bool:
    """Whether the steps of a loop give tensors of a size that only a run tells, as a part does that
    may end before the tensor: stacked they have one size in all steps.
    """
    bodies = [body for _, body in program.graph_module.named_modules()]
    values = [
        each.meta.get("val")
        for body in bodies[1:]
        if isinstance(body, torch.fx.GraphModule)
        for each in body.graph.output_node().all_input_nodes
    ]
    return any(isinstance(each, torch.Tensor) and free_unbacked_symbols(each) for each in values)


def asserted(program: ExportedProgram) -> Iterator[sympy.Basic]:
    """The conditions on sizes that a trace keeps as nodes of its graph."""
    for node in program.graph.nodes:
        if node.target is torch.ops.aten._assert_scalar.default:
            held = node.args[0]
            value = held.meta.get("val") if isinstance(held, torch.fx.Node) else None
            if isinstance(value, torch.SymBool):
                yield value.node.expr


def asserted_sizes(program: ExportedProgram) -> Iterator[tuple[sympy.Symbol, sympy.Expr]]:
    """Each size that the program asserts, as it runs, to be what it computes from others.

    torch.export keeps both where it defers its guards, and knows one size else.
    """
    for equal in asserted(program):
        for size, other in (equal.args, equal.args[::-1]) if isinstance(equal, sympy.Eq) else ():
            if isinstance(size, sympy.Symbol) and isinstance(other, sympy.Expr):
                yield size, other


def bounded(program: ExportedProgram, asked: Iterable[Request]) -> tuple[Request, ...]:
    """The dims that are no longer than the sample, as tables are that an earlier call left."""
    return tuple(
        request for request, end in _ends(program, asked) if end == request.size != request.high
    )


def ended(program: ExportedProgram, asked: Iterable[Request]) -> dict[Request, int]:
    """The dims that are longer than the sample, but not as long as was asked, with their ends."""
    return {
        request: end
        for request, end in _ends(program, asked)
        if request.size < end <= _LONGEST * request.size and end < (request.high or end + 1)
    }


def _ends(program: ExportedProgram, asked: Iterable[Request]) -> Iterator[tuple[Request, int]]:
    for request, size in open_sizes(program, asked):
        bounds = None if size is None else program.range_constraints.get(size)
        if bounds is not None and isinstance(bounds.upper, (int, sympy.Integer)):
            yield request, int(bounds.upper)


def demanded(program: ExportedProgram, asked: Sequence[Request]) -> tuple[Request, ...]:
    """The dims of which a trace demands something that doesn't hold beyond the sample's size.

    As n = 4 * ((n + 3) // 4), or that nothing is missing to whole chunks.
    """
    return tuple(
        request
        for request, symbol, guards in _alone(program, asked)
        if any(
            isinstance(guard, sympy.Eq) or leaves(guard, symbol, request.size) for guard in guards
        )
    )


def turning(program: ExportedProgram, asked: Sequence[Request]) -> dict[Request, int]:
    """The dims of whose remainder or quotient a trace demands something, with the first size beyond
    the sample's that isn't so, nor the next: where the frames of a signal are odd instead of even.
    """
    found = {}
    for request, symbol, guards in _alone(program, asked):
        recurring = [guard for guard in guards if guard.has(FloorDiv, Mod)]
        sizes = range(request.size + 1, request.size + _TRIED) if symbol.is_Symbol else ()
        for size in sizes if recurring else ():
            if any(leaves(guard, symbol, size - 1) for guard in recurring):
                found[request] = size
                break
    return found


def _alone(
    program: ExportedProgram, asked: Sequence[Request]
) -> Iterator[tuple[Request, sympy.Basic, list[sympy.Basic]]]:
    """The dims that a trace left open, with their sizes and what it demands of each by itself."""
    env = shape_env(program)
    guards = [guard.expr for guard in env.guards] if env is not None else []
    guards += asserted(program)
    for request, symbol in open_sizes(program, asked):
        if symbol is not None:
            alone = [guard for guard in guards if guard.free_symbols == symbol.free_symbols]
            yield request, symbol, alone


def leaves(guard: sympy.Basic, symbol: sympy.Basic, size: int) -> bool:
    """Whether both of the next sizes are excluded."""
    return symbol.is_Symbol and all(
        at_sizes(guard, {symbol: sympy.Integer(size + more)}) == sympy.false for more in (1, 2)
    )


def sizes_of(
    program: ExportedProgram, asked: Sequence[Request], sizes: Sequence[int]
) -> Iterator[tuple[sympy.Symbol, int]]:
    """The dims that a program was traced with at other sizes than the sample's, with these.

    They are the typical ones: there a quotient isn't 1, as it may be at the sample's, and no type
    is taken for one that a single block has.
    """
    for (_, given), size in zip(open_sizes(program, asked), sizes, strict=False):
        if isinstance(given, sympy.Symbol):
            yield given, size


def of_size(
    program: ExportedProgram, asked: Sequence[Request], symbols: Iterable[sympy.Symbol]
) -> list[Request]:
    """The dims that have the size of one which these symbols stand for."""
    env = shape_env(program)
    assert env is not None
    known = {free for symbol in symbols for free in env.replace(symbol).free_symbols}
    every = open_sizes(program, asked)
    sizes = {each.size for each, own in every if own is not None and known & own.free_symbols}
    return [request for request in asked if request.size in sizes]
