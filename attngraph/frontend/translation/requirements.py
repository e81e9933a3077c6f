"""What a model requires of its inputs' values, which a file of operators computes without.

`torch._check` of a number that `.item()` reads, and `torch._assert_async`, are assertions in an
exported program. Of sizes they are conditions of the graph (conditions.py), which the file checks;
of values they vanish, and are told. So are the matrices of which torch asks something.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import fx
from torch.export import ExportedProgram

from attngraph.errors import listed
from attngraph.frontend.watching.asked import marked
from attngraph.frontend.watching.locations import Locator
from attngraph.ir.ops import op_name
from attngraph.ir.traits import CHOLESKY, INVERSE

_ASSERTS = (torch.ops.aten._assert_async.default, torch.ops.aten._assert_async.msg)
_ITEMS = (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default)
_TEXT = re.compile(r"expression (.*) on node")
_LEAST = re.compile(r"u\d+ >= (?:[0-2]|-\d+)|0 <= [u\d+*() ]+")
_EQUAL = re.compile(r"^Eq\(([^,()]+), ([^,()]+)\)$")


def requirement_notes(program: ExportedProgram) -> list[str]:
    """A note on what the file goes on without, if there is something."""
    found = list(dict.fromkeys(_required(program)))
    if not found:
        return []
    return [
        f"The model stops with an error unless {listed(found)}; the file doesn't check values, and "
        "goes on."
    ]


def _required(program: ExportedProgram) -> Iterator[str]:
    locator, read = Locator(), dict[str, str]()
    sizes = dict(_sizes(program))
    given = _given(program)
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.target in _ITEMS and isinstance(value, torch.SymInt):
            # the symbol that it was read as; by now it may be known to equal another
            own = value.node._expr
            read[str(own)] = f"the number read at {locator.of(node)}"
        elif node.target in _ASSERTS and marked(node) is None:
            said = f" ({node.args[1]})" if len(node.args) > 1 else ""
            yield f"what {locator.of(node)} asserts holds{said}"
        elif node.target is torch.ops.aten._assert_scalar.default:
            yield from _of_numbers(node, read, sizes)
        elif node in given and isinstance(node.target, torch._ops.OpOverload):
            for trait, needed in ((INVERSE, "has an inverse"), (CHOLESKY, "is positive definite")):
                if op_name(node.target) in trait:
                    yield f"the matrix at {locator.of(node)} {needed}"


def _given(program: ExportedProgram) -> set[fx.Node]:
    """What is computed from the model's inputs, and not from its weights alone."""
    names = set(program.graph_signature.user_inputs)
    found = set[fx.Node]()
    for node in program.graph.nodes:
        if node.name in names or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _sizes(program: ExportedProgram) -> Iterator[tuple[str, str]]:
    """A name for each symbol of a size: the axis of an input that has it."""
    for node in reversed(list(program.graph.nodes)):
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, torch.Tensor):
            for axis, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                    yield str(size.node.expr), f"{node.name}.shape[{axis}]"


def _of_numbers(node: fx.Node, read: dict[str, str], sizes: dict[str, str]) -> Iterator[str]:
    """A condition on what `.item()` read; that a size is no less than 0, or 2, is torch's own, and
    so is what is said of sums and products of sizes."""
    text = _TEXT.search(str(node.args[1]))
    if text is None or _LEAST.fullmatch(text[1]):
        return
    told = [f"{name}: {read[name]}" for name in read if re.search(rf"\b{name}\b", text[1])]
    shown = _EQUAL.sub(r"\1 = \2", text[1])
    for symbol, size in sizes.items():
        shown = re.sub(rf"\b{symbol}\b", size, shown)
    if told:
        yield f"{shown} ({', '.join(told)})"
