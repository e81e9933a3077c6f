"""In-place operators as values.

torch's own functionalization traces the program once more, which costs as much as the export. Most
models mutate at most a fresh temporary (`mask.masked_fill_(…)`, `scores += bias`): there, the
in-place operator is its functional twin, and what was mutated is read as the twin's result.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._C._functorch import get_interpreter_stack, pop_dynamic_layer_stack
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from attngraph.errors import CaptureError
from attngraph.frontend.translation.inline import (
    attends_flexibly,
    batches,
    enables_autocast,
    inline,
)
from attngraph.frontend.translation.written_views import replace_written
from attngraph.frontend.watching.locations import Locator
from attngraph.inference import AS_WRITTEN
from attngraph.ir.ops import op_name
from attngraph.ir.storage import memory_of, place_of

IDENTITY_IN_PLACE = frozenset(["aten.detach_", "aten.dropout_", "aten.lift_fresh"])
_OUT_OF_PLACE = {
    "__iadd__": "add",
    "__isub__": "sub",
    "__imul__": "mul",
    "__iand__": "bitwise_and",
    "__ior__": "bitwise_or",
    "__ixor__": "bitwise_xor",
}


@dataclass(frozen=True)
class Functional:
    """A program's flat graph, with what to run instead of each in-place operator.

    `twins` maps an in-place node to the operator that computes its result; `handles` maps it to the
    earlier nodes that are the same tensor, and so have the new value from there on.
    """

    program: ExportedProgram
    graph: fx.Graph
    twins: dict[fx.Node, torch._ops.OpOverload] = field(default_factory=dict)
    handles: dict[fx.Node, tuple[fx.Node, ...]] = field(default_factory=dict)


def functionalize(program: ExportedProgram) -> Functional:
    """The program without mutation.

    It is retraced only where a view, an input or a buffer is mutated, under autocast, for vmap and
    for flex_attention.

    Raises CaptureError where torch leaves a mutating operator in the graph.
    """
    module = program.graph_module
    _know_their_users(module)
    _leave_out_what_raised(module)
    _keep_the_shapes_of_buffers(module.graph)
    if not any(ask(module) for ask in (enables_autocast, batches, attends_flexibly)):
        found = _with_twins(program, inline(module))
        if found is not None:
            return found
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch copies deprecated classes of its own here
        program = _retraced(program)
    graph = inline(program.graph_module)
    found = _with_twins(program, graph)
    if found is None:
        node = next(node for node in graph.nodes if _mutates(node))
        raise CaptureError(
            f"torch can't express the in-place operator {node.target} at {Locator().of(node)} as a "
            "value; write it out of place."
        )
    return found


def _know_their_users(module: fx.GraphModule) -> None:
    """Puts every node among the users of what it reads.

    In a program of torch.export 2.13 one was missing there, a size that was read of a selection
    (jev of transformers): fx fails with a SystemError where such a node is given other arguments.
    """
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            for node in part.graph.nodes:
                for read in node.all_input_nodes:
                    read.users.setdefault(node)


def _leave_out_what_raised(module: fx.GraphModule) -> None:
    """Erases operators that failed in the trace, which the code caught: they have no result."""
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            for node in reversed(part.graph.nodes):
                of_torch = isinstance(node.target, torch._ops.OpOverload)
                has_result = node.meta.get("val") is not None or node.users
                if of_torch and node.target._schema.returns and not has_result:
                    part.graph.erase_node(node)


def _keep_the_shapes_of_buffers(graph: fx.Graph) -> None:
    """Leaves out what torch.export writes of a table that the model has made anew for this size.

    It takes it for a write into the table that was there, which has another size. What the model
    writes into a tensor of its own, or spreads over one, stays.
    """
    for node in reversed(graph.nodes):
        if node.target is not torch.ops.aten.copy_.default or node.users:
            continue
        kept, made = (each.meta.get("val") for each in node.args)
        is_stored = getattr(node.args[0], "op", "") in ("placeholder", "get_attr")
        if is_stored and None not in (kept, made) and not _spreads(made.shape, kept.shape):
            graph.erase_node(node)


def _spreads(made: Sequence[object], kept: Sequence[object]) -> bool:
    """Whether one shape broadcasts to the other."""
    pairs = zip(reversed(made), reversed(kept), strict=False)
    return len(made) <= len(kept) and all(str(a) in ("1", str(b)) for a, b in pairs)


def _retraced(program: ExportedProgram) -> ExportedProgram:
    retraced: ExportedProgram
    with AS_WRITTEN, _constants_as_buffers(program), _same_levels():
        try:
            retraced = program.run_decompositions({})
        except GuardOnDataDependentSymNode:
            # What led to the sizes that the first trace knew is still there, and nothing reads it.
            program.graph_module.graph.eliminate_dead_code()
            retraced = program.run_decompositions({})
        except AssertionError:
            if not _put_under_one_name(program):
                raise
            retraced = program.run_decompositions({})
    return retraced


@contextmanager
def _same_levels() -> Iterator[None]:
    """Takes away the levels that a graph leaves behind which fails in a vmap of its own."""
    depth = len(get_interpreter_stack() or ())
    try:
        yield
    finally:
        while len(get_interpreter_stack() or ()) > depth:
            pop_dynamic_layer_stack()


def _put_under_one_name(program: ExportedProgram) -> bool:
    """Reads each weight and buffer by the first of its names; whether some had several.

    Where a module that layers share writes into a buffer, torch retraces no program that has it
    under the name of each layer.
    """
    graph, signature = program.graph_module.graph, program.graph_signature
    stored = {**program.state_dict, **program.constants}
    nodes = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    first: dict[Hashable, fx.Node] = {}
    kept = []
    for spec in signature.input_specs:
        node, tensor = nodes[spec.arg.name], stored.get(spec.target or "")
        known = node if tensor is None else first.setdefault(place_of(tensor), node)
        if known is node:
            kept.append(spec)
        else:
            node.replace_all_uses_with(known)
            graph.erase_node(node)
    found = len(kept) < len(signature.input_specs)
    signature.input_specs[:] = kept
    program.graph_module.recompile()
    return found


@contextmanager
def _constants_as_buffers(program: ExportedProgram) -> Iterator[None]:
    """Tensors kept in plain attributes count as buffers: torch lets only those be written to."""
    specs = program.graph_signature.input_specs
    constants = [spec for spec in specs if spec.kind is InputKind.CONSTANT_TENSOR]
    for spec in constants:
        spec.kind, spec.persistent = InputKind.BUFFER, False
    try:
        yield
    finally:
        for spec in constants:
            spec.kind, spec.persistent = InputKind.CONSTANT_TENSOR, None


def functional_body(program: ExportedProgram, module: fx.GraphModule) -> Functional:
    """A loop's body without mutation: traced once more where a view or an input is mutated.

    Raises CaptureError where torch leaves a mutating operator in it.
    """
    found = _with_twins(program, inline(module))
    if found is None:
        node = next(node for node in module.graph.nodes if _mutates(node))
        found = _with_twins(program, _without_mutation(module))
    if found is None:
        raise CaptureError(
            f"A loop's body mutates a tensor in place ({node.target} at {Locator().of(node)}); "
            "write it out of place."
        )
    return found


def _without_mutation(module: fx.GraphModule) -> fx.Graph:
    """The graph of a loop's body, traced through torch's functionalization."""
    given = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    run: Any = torch.func.functionalize(fx.Interpreter(module).run, remove="mutations")
    with fx_traceback.preserve_node_meta(), torch.no_grad():
        return inline(make_fx(run)(*given))


def _mutates(node: fx.Node) -> bool:
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and node.target._schema.is_mutable
        and op_name(node.target) not in IDENTITY_IN_PLACE
    )


def _with_twins(program: ExportedProgram, graph: fx.Graph) -> Functional | None:
    if not any(map(_mutates, graph.nodes)):
        return Functional(program, graph)
    replace_written(graph, _Aliases(list(graph.nodes)).groups(), _twin)
    nodes: list[fx.Node] = list(graph.nodes)
    order = {node: position for position, node in enumerate(nodes)}
    aliases = _Aliases(nodes)
    found = Functional(program, graph)
    same: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        if op_name(node.target) in IDENTITY_IN_PLACE:
            _join(same, node)
        if not _mutates(node):
            continue
        twin = _twin(node)
        if twin is None or not aliases.known(node):
            return None
        handles = _join(same, node)
        for member in aliases.of(node):
            if member.op != "call_function":
                return None
            is_read_later = any(order[user] > order[node] for user in member.users)
            if member not in handles and order[member] < order[node] and is_read_later:
                return None
        found.twins[node] = twin
        found.handles[node] = tuple(handles)
    return found


def _join(same: dict[fx.Node, list[fx.Node]], node: fx.Node) -> list[fx.Node]:
    """Records that an in-place node is the same tensor as its first argument."""
    source = node.args[0]
    if not isinstance(source, fx.Node):
        return [node]
    handles = same.setdefault(source, [source])
    handles.append(node)
    same[node] = handles
    return handles


def _twin(node: fx.Node) -> torch._ops.OpOverload | None:
    """The functional operator of an in-place one, if it gives the same dtype and shape."""
    overload = node.target
    assert isinstance(overload, torch._ops.OpOverload)
    written = [a.name for a in overload._schema.arguments if a.alias_info and a.alias_info.is_write]
    name = overload._schema.name.split("::")[1]
    if len(written) != 1 or not node.args or overload._schema.arguments[0].name != written[0]:
        return None
    packet = getattr(torch.ops.aten, _OUT_OF_PLACE.get(name, name.removesuffix("_")), None)
    twin = getattr(packet, overload._overloadname, None)
    if not isinstance(twin, torch._ops.OpOverload) or twin._schema.is_mutable:
        return None
    source = node.args[0]
    target = source.meta.get("val") if isinstance(source, fx.Node) else None
    if not isinstance(target, FakeTensor):
        return None
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    try:
        with target.fake_mode, torch.no_grad():
            result: Any = twin(*args, **kwargs)
    except Exception:
        return None  # torch's functionalization decides then
    same = isinstance(result, torch.Tensor) and result.dtype == target.dtype
    return twin if same and len(result.shape) == len(target.shape) else None


class _Aliases:
    """Which nodes may share memory: by the trace's storages, and by the operators' schemas.

    An operator that returns its input or a copy, as sizes have it, is taken to alias.
    """

    def __init__(self, nodes: list[fx.Node]) -> None:
        self._parent: dict[object, object] = {}
        self._nodes = nodes
        for node in nodes:
            storage = _storage(node)
            if storage is not None:
                self._union(node, storage)
            if isinstance(node.target, torch._ops.OpOverload):
                for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
                    if (
                        argument.alias_info
                        and isinstance(value, fx.Node)
                        and _dtype(node) in (None, _dtype(value))
                    ):
                        self._union(node, value)
            elif node.target is operator.getitem and not _returns_new(node.args[0]):
                self._union(node, node.args[0])

    def known(self, node: fx.Node) -> bool:
        """Whether storages tell aliases here; a program read from a file has lost them."""
        source = node.args[0]
        return isinstance(source, fx.Node) and _storage(node) == _storage(source)

    def of(self, node: fx.Node) -> list[fx.Node]:
        root = self._find(node)
        return [other for other in self._nodes if self._find(other) == root]

    def groups(self) -> list[list[fx.Node]]:
        """The nodes that may share memory with a node that is written to, of each of these."""
        found: dict[object, list[fx.Node]] = {}
        for node in self._nodes:
            found.setdefault(self._find(node), []).append(node)
        written = [group for group in found.values() if any(map(_mutates, group))]
        return [group for group in written if all(self.known(n) for n in group if _mutates(n))]

    def _find(self, item: object) -> object:
        while (parent := self._parent.get(item, item)) != item:
            item = parent
        return item

    def _union(self, a: object, b: object) -> None:
        self._parent[self._find(a)] = self._find(b)


def _returns_new(node: Any) -> bool:
    """Whether an operator's results have memory of their own each, as those of topk have."""
    overload = node.target
    return isinstance(overload, torch._ops.OpOverload) and not any(
        argument.alias_info for argument in overload._schema.arguments
    )


def _dtype(node: fx.Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None


def _storage(node: fx.Node) -> int | None:
    value = node.meta.get("val")
    return memory_of(value) if isinstance(value, torch.Tensor) else None
