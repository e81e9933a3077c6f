"""What a trace relies on of its sizes: the conditions that Python's branches on a length leave.

torch.export keeps them in three places: as guards of the trace, as their text in a program that was
read from a file, and as assertions in the graph where it defers them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import sympy
import torch
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from attngraph.errors import IRError
from attngraph.frontend.sizes.program_dims import asserted, shape_env, user_placeholders
from attngraph.frontend.sizes.symbols import Symbols, without_remainders
from attngraph.ir.conditions import (
    Condition,
    always,
    arranged,
    format_condition,
    over_integers,
    parse_condition,
)
from attngraph.ir.dims import DimInfo, symbol, symbols_of

_SIZE = re.compile(r"L((?:\['\w+'\]|\[\d+\])+)\.size\(\)\[(\d+)\]")


def conditions_of(
    program: ExportedProgram, symbols: Symbols
) -> tuple[tuple[Condition, ...], tuple[str, ...]]:
    """The conditions in the user's dims, and the texts of those that can't be read.

    Left out is what holds for every size of the dims. `symbols` has a name for each dim of the
    inputs; conditions on other sizes are of a run, which are the graph's own.
    """
    infos = _unbounded(symbols.infos)
    found: dict[str, Condition] = {}
    unread: list[str] = []
    guards = list(_guards(program))
    for guard in (*guards, *asserted(program)):
        if symbols.unnamed([guard]):
            continue
        _add(found, symbols.renamed(guard), infos)
    sizes = _sizes(program, symbols)
    for text in getattr(program, "_guards_code", ()):
        try:
            _add(found, _parsed(text, sizes), infos)
        except (IRError, KeyError):
            if not guards:
                unread.append(text)
    return tuple(found.values()), tuple(unread)


def split(condition: Condition) -> tuple[Condition, ...]:
    """The conditions that must all hold for one to hold, of whole numbers where they can be."""
    condition = over_integers(condition)
    parts = condition.args if isinstance(condition, sympy.And) else (condition,)
    return tuple(map(arranged, parts))


def _add(found: dict[str, Condition], condition: Condition, infos: Mapping[str, DimInfo]) -> None:
    for part in split(condition):
        if always(part, infos) is not True:
            found.setdefault(format_condition(part), part)


def _unbounded(infos: Mapping[str, DimInfo]) -> dict[str, DimInfo]:
    """The dims without the ends that a trace may have drawn from its own conditions.

    Sizes are 2 or more, as a trace takes them.
    """
    return {name: DimInfo(2, None, info.hint) for name, info in infos.items()}


def _guards(program: ExportedProgram) -> Iterator[sympy.Basic]:
    """The guards of the trace that this process made, in the symbols that are left."""
    if (env := shape_env(program)) is not None:
        for guard in env.guards:
            yield env.simplify(guard.expr)


def _sizes(program: ExportedProgram, symbols: Symbols) -> dict[str, Any]:
    """The size of each axis of each input, under the name that torch's text has for it."""
    nodes, spec = user_placeholders(program), program.call_spec.in_spec
    if spec is None or spec.num_leaves != len(nodes):
        return {}
    args, kwargs = pytree.tree_unflatten(range(len(nodes)), spec)
    signature = program.module_call_graph[0].signature
    names = (signature and signature.forward_arg_names) or []
    roots = {f"['{name}']": tree for name, tree in zip(names, args, strict=False)}
    roots.update({f"['{name}']": tree for name, tree in kwargs.items()})
    found: dict[str, Any] = {}
    for root, tree in roots.items():
        for path, leaf in pytree.tree_flatten_with_path(tree)[0]:
            value = nodes[leaf].meta.get("val")
            for axis, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
                key = f"{root}{pytree.keystr(path)}.{axis}"
                found[key] = symbols.read(size)
    return found


def _parsed(text: str, sizes: Mapping[str, Any]) -> Condition:
    """torch's text of a guard. Raises IRError or KeyError for one of another form."""
    places: dict[str, str] = {}

    def named(match: re.Match[str]) -> str:
        return places.setdefault(f"{match[1]}.{match[2]}", f"_n{len(places)}")

    condition = parse_condition(_SIZE.sub(named, text))
    unknown = symbols_of(condition) - set(places.values())
    if unknown:
        raise IRError(f"{text!r} is not about sizes alone.")
    known = {symbol(name): sympy.sympify(sizes[key]) for key, name in places.items()}
    return without_remainders(condition.xreplace(known))
