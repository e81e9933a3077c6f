"""The dims of an exported program, and names for them: it doesn't keep those its author gave."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import sympy
import torch
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from attngraph.errors import UsageError
from attngraph.frontend.shapes import Request

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


def asserted_sizes(program: ExportedProgram) -> Iterator[tuple[sympy.Symbol, sympy.Expr]]:
    """Each size that the program asserts, as it runs, to be what it computes from others.

    torch.export keeps both where it defers its guards, and knows one size else.
    """
    for node in program.graph.nodes:
        if node.target is not torch.ops.aten._assert_scalar.default:
            continue
        holds = node.args[0].meta.get("val") if isinstance(node.args[0], torch.fx.Node) else None
        equal = holds.node.expr if isinstance(holds, torch.SymBool) else None
        if isinstance(equal, sympy.Eq):
            for size, other in (equal.args, equal.args[::-1]):
                if isinstance(size, sympy.Symbol) and isinstance(other, sympy.Expr):
                    yield size, other


def bounded(program: ExportedProgram, asked: Iterable[Request]) -> tuple[Request, ...]:
    """The dims that are no longer than the sample, as tables are that an earlier call left."""
    placeholders, ranges = user_placeholders(program), program.range_constraints
    found = []
    for request in asked:
        size = placeholders[request.leaf].meta["val"].shape[request.axis]
        bounds = ranges.get(size.node.expr) if isinstance(size, torch.SymInt) else None
        if bounds is not None and bounds.upper == request.size != request.high:
            found.append(request)
    return tuple(found)


def ended(program: ExportedProgram, asked: Iterable[Request]) -> dict[Request, int]:
    """The dims that are longer than the sample, but not as long as was asked, with their ends."""
    placeholders, ranges = user_placeholders(program), program.range_constraints
    found = {}
    for request in asked:
        size = placeholders[request.leaf].meta["val"].shape[request.axis]
        bounds = ranges.get(size.node.expr) if isinstance(size, torch.SymInt) else None
        if bounds is None or not isinstance(bounds.upper, (int, sympy.Integer)):
            continue
        end = int(bounds.upper)
        if request.size < end <= _LONGEST * request.size and end < (request.high or end + 1):
            found[request] = end
    return found


def demanded(program: ExportedProgram, asked: Sequence[Request]) -> tuple[Request, ...]:
    """The dims of which a trace demands an equation, as the sample's n = 4 * ((n + 3) // 4)."""
    placeholders, env = user_placeholders(program), shape_env(program)
    equations = [guard.expr for guard in env.guards] if env is not None else []
    alone = [each.free_symbols for each in equations if isinstance(each, sympy.Eq)]
    sizes = [placeholders[each.leaf].meta["val"].shape[each.axis] for each in asked]
    return tuple(
        request
        for request, size in zip(asked, sizes, strict=True)
        if isinstance(size, torch.SymInt) and size.node.expr.free_symbols in alone
    )


def sizes_of(
    program: ExportedProgram, asked: Sequence[Request], sizes: Sequence[int]
) -> Iterator[tuple[sympy.Symbol, int]]:
    """The dims that a program was traced with at other sizes than the sample's, with these.

    They are the typical ones: there a quotient isn't 1, as it may be at the sample's, and no type
    is taken for one that a single block has.
    """
    placeholders = user_placeholders(program)
    for request, size in zip(asked, sizes, strict=False):
        given = placeholders[request.leaf].meta["val"].shape[request.axis]
        if isinstance(given, torch.SymInt) and isinstance(given.node.expr, sympy.Symbol):
            yield given.node.expr, size


def of_size(
    program: ExportedProgram, asked: Sequence[Request], symbols: Iterable[sympy.Symbol]
) -> list[Request]:
    """The dims that have the size of one which these symbols stand for."""
    placeholders, env = user_placeholders(program), shape_env(program)
    assert env is not None
    known = {free for symbol in symbols for free in env.replace(symbol).free_symbols}
    sizes = set()
    for request in asked:
        size = placeholders[request.leaf].meta["val"].shape[request.axis]
        if isinstance(size, torch.SymInt) and known & size.node.expr.free_symbols:
            sizes.add(request.size)
    return [request for request in asked if request.size in sizes]
