"""From a module or an exported program to a Graph."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import sympy
import torch
from torch.export import ExportedProgram
from torch.export.dynamic_shapes import ShapesCollection
from torch.utils import _pytree as pytree

from attngraph.errors import AttngraphError, CaptureError, UsageError
from attngraph.frontend.files.script import script_to_program
from attngraph.frontend.interface.binding import keywords_stated
from attngraph.frontend.interface.fixed_inputs import boxed, boxes_opened, opened
from attngraph.frontend.interface.outputs import set_outputs
from attngraph.frontend.interface.own_classes import make_known, names_of_known, shapes_by_attribute
from attngraph.frontend.interface.shapes import (
    Request,
    combine,
    named_dims,
    nested_shapes,
    requested_dims,
)
from attngraph.frontend.interface.signature import Signature
from attngraph.frontend.interface.state import state_notes
from attngraph.frontend.rewording.cut_for_memory import whole_note
from attngraph.frontend.rewording.hit_loops import Hits, all_places_note
from attngraph.frontend.rewording.memoised import bounded
from attngraph.frontend.rewording.rounded_for_speed import left_out_note
from attngraph.frontend.sizes.asked_ranges import Parting
from attngraph.frontend.sizes.conditions import conditions_of
from attngraph.frontend.sizes.dim_names import name_dims
from attngraph.frontend.sizes.limits import Limits, settled_limits
from attngraph.frontend.sizes.program_dims import named_symbols, shape_env, sizes_of
from attngraph.frontend.sizes.suspects import Suspect, unequal
from attngraph.frontend.sizes.symbols import Symbols
from attngraph.frontend.tracing.exporting import untranslated
from attngraph.frontend.tracing.traced import Subject, Traced
from attngraph.frontend.tracing.tracing import trace
from attngraph.frontend.translation.complex_pairs import take_pairs
from attngraph.frontend.translation.conditionals import conditional_notes
from attngraph.frontend.translation.functional import functionalize
from attngraph.frontend.translation.loops import LoopTranslator
from attngraph.frontend.translation.notes import (
    mutation_notes,
    replayed_note,
    taken_apart_note,
    unread_note,
    wrapped_notes,
)
from attngraph.frontend.translation.requirements import requirement_notes
from attngraph.frontend.watching.asked import Asked, Place
from attngraph.inference import each_leaf
from attngraph.ir.conditions import Condition, multiples
from attngraph.ir.dims import symbols_of
from attngraph.ir.graph import Graph
from attngraph.ir.storage import as_pairs, from_pairs

_ONE_AT_A_TIME = threading.Lock()
"""torch.export keeps its modes, and what it replaces in torch, for the whole process."""


@dataclass(frozen=True)
class Captured:
    """A model as a graph, and how its caller's inputs and outputs map to the graph's.

    `args` are the sample tensors in the order of the graph's inputs; what else the model
    is given, numbers and None, are constants of the trace. `dynamic` maps (input, axis) to the
    dim's name. `signature` is how the model is called and what it returns. `sample` is the (args,
    kwargs) that was traced. `notes` are sentences for the user.
    `apart` are the pairs of dims that the trace took for unequal, and `suspects` conditions that
    may be required: what the trace says of other sizes is to be checked. `demanded` are those that
    the trace needs, with where the code asks them. `branches` are the places where the code chooses
    by a tensor's values, with the side that was followed; at `jumps` the line goes by a number of
    them alone. `asked` are such conditions in the order of the trace, where they were kept. Loops
    over `hits` have all turns. `fixed` are the notes that name the dims which became constants.
    Where it is `opened`, slices that may be cut short are as long as they are. A `refusal` is of a
    trace that may demand more than what was asked; it stands if one of the `suspects` is required.
    At `partings` the code does another thing at other sizes that were asked for.
    """

    graph: Graph
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    dynamic: dict[tuple[int, int], str]
    args: tuple[torch.Tensor, ...]
    signature: Signature
    sample: tuple[tuple[Any, ...], dict[str, Any]]
    notes: tuple[str, ...] = ()
    apart: tuple[tuple[str, str], ...] = ()
    suspects: tuple[Suspect, ...] = ()
    demanded: Mapping[Condition, str] = field(default_factory=dict)
    branches: Mapping[Place, bool] = field(default_factory=dict)
    fixed: tuple[str, ...] = ()
    refusal: CaptureError | None = None
    opened: bool = False
    jumps: frozenset[Place] = frozenset()
    hits: Hits | None = None
    asked: tuple[Asked, ...] = ()
    partings: tuple[Parting, ...] = ()

    def renamed(self, names: Mapping[str, str]) -> Captured:
        """With inputs and outputs renamed, in the graph too; `names` maps old to new."""
        if not names:
            return self
        self.graph.rename(names)
        inputs = tuple(value.name for value in self.graph.inputs)
        return replace(self, input_names=inputs, output_names=self.graph.output_names)

    def call(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The eager model's (args, kwargs) with these tensors in place of the sample's."""
        rest = iter(tensors)

        def own(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            return from_pairs(next(rest)) if leaf.is_complex() else next(rest)

        filled: tuple[tuple[Any, ...], dict[str, Any]] = each_leaf(own, self.sample)
        return filled


def capture(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    *,
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    sides: Mapping[Place, bool] | None = None,
    way: tuple[bool, ...] | None = None,
    elsewhere: bool = False,
    steps: frozenset[int] = frozenset(),
) -> Captured:
    """Traces a module with torch.export, as it is at inference, undecomposed and functional.

    `dynamic_shapes` is torch.export's, or has names in place of its Dims. A Dim keeps its name; the
    same name is the same dim. With `sides` a branch on a tensor's values is followed on one side,
    with a `way` too it is `asked`, and with `elsewhere` a sample that leads into a special case
    gives way to one of other sizes: both are to be checked. Loops of so many `steps` are scans. The
    module's training flags are as before afterwards. Raises CaptureError where torch.export can't
    trace it or a dim that was asked for becomes a constant, UsageError where the inputs don't fit.
    """
    if not isinstance(module, torch.nn.Module):
        raise UsageError(
            f"A {type(module).__name__} is no torch.nn.Module; give one that calls it."
        )
    if isinstance(args, torch.Tensor):
        raise UsageError("The samples are a tensor; give a tuple of the inputs, such as (x,).")
    if args is None:
        raise UsageError("The samples are None; give a tuple of the inputs, such as (x,).")
    if isinstance(args, Mapping):
        raise UsageError("The samples are a dict; give a tuple of the inputs, and names in kwargs.")
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise UsageError(
            "Autocast is on, and a trace doesn't have it: leave the block, and name a precision "
            "to the compiler instead."
        )
    args, named = tuple(args), dict(kwargs or {})
    if isinstance(dynamic_shapes, ShapesCollection):
        by_input: Callable[..., Any] = dynamic_shapes.dynamic_shapes
        dynamic_shapes = by_input(module, args, named)
    args, named = boxed((args, named))
    make_known((args, named))
    dynamic_shapes = named_dims(dynamic_shapes)
    if isinstance(module, torch.jit.ScriptModule):
        with _ONE_AT_A_TIME, bounded():
            program = script_to_program(module, args, named, dynamic_shapes)
        return from_program(program, args, kwargs=named, dynamic_shapes=dynamic_shapes)
    with (
        keywords_stated(module, named, dynamic_shapes) as shapes,
        boxes_opened(module, args, named),
    ):
        inputs = combine(module, args, named)
        shapes = shapes_by_attribute(inputs, nested_shapes(inputs, module, shapes))
        named = _in_signature_order(module, named)
        args, named = _distinct(args, named)
        with _ONE_AT_A_TIME, bounded():
            subject = Subject(module, args, named, shapes, sides, way, steps)
            traced = trace(subject, elsewhere=elsewhere)
        parameters = inspect.signature(module.forward)
        try:
            captured = _captured_open(traced, (args, named), parameters, module)
        except AttngraphError:
            raise
        except Exception as error:
            raise untranslated(error, subject) from error
        return replace(captured, notes=(*captured.notes, *state_notes(module, args, named)))


def from_program(
    program: ExportedProgram,
    args: tuple[Any, ...] | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    dim_names: Mapping[tuple[str, int], str] | None = None,
) -> Captured:
    """A program of torch.export as a graph.

    `args` and `kwargs` are samples; without them, those the program carries. A program doesn't keep
    the names of its dims: `dynamic_shapes` or `dim_names`, by (input, axis), give them, else they
    are named after the first input that has them (`input_ids_1`). Raises CaptureError for control
    flow, UsageError where `dim_names` don't fit the program.
    """
    named = dict(kwargs or {})
    if args is None and program.example_inputs is not None:
        args, named = program.example_inputs
    dynamic_shapes = named_dims(dynamic_shapes)
    requests: tuple[Request, ...] = ()
    ordered = (tuple(args or ()), _in_program_order(program, named))
    if args is not None and dynamic_shapes:
        requests = requested_dims(combine(program.module(), tuple(args), named), dynamic_shapes)
    symbols = named_symbols(program, dim_names or {})
    return _captured(Traced(program, requests, requests), ordered, None, names=symbols)


def _captured_open(
    traced: Traced,
    sample: tuple[tuple[Any, ...], dict[str, Any]],
    parameters: inspect.Signature,
    module: torch.nn.Module,
) -> Captured:
    """A trace as a graph; the closed one where open slices are refused, or leave one size alone."""
    closed = traced.closed
    try:
        captured = _captured(traced, sample, parameters, module)
        if closed is None or not any(map(_fixes_a_dim, captured.graph.conditions)):
            return captured
    except CaptureError:
        if closed is None:
            raise
    if isinstance(closed, CaptureError):
        raise closed
    return _captured(closed, sample, parameters, module)


def _fixes_a_dim(condition: Condition) -> bool:
    """Whether it leaves a dim one size, as min(4, n − 8) = 1 does."""
    is_of_one = isinstance(condition, sympy.Eq) and len(symbols_of(condition)) == 1
    return is_of_one and not multiples([condition])


def _captured(
    traced: Traced,
    sample: tuple[tuple[Any, ...], dict[str, Any]],
    parameters: inspect.Signature | None,
    module: torch.nn.Module | None = None,
    names: Mapping[sympy.Symbol, str] = MappingProxyType({}),
) -> Captured:
    leaves, sample = pytree.tree_leaves(sample), opened(sample)
    program, symbols = traced.program, Symbols()
    name_dims(program, leaves, traced.requests, symbols, names)
    demanded, unread = conditions_of(program, symbols)
    limits = _limits(traced, symbols, demanded)
    symbols.infos.update(limits.dims)
    for traced_as, size in sizes_of(program, traced.requests, traced.resampled):
        name = str(symbols.renamed(traced_as))
        if name in symbols.infos:
            symbols.infos[name] = replace(symbols.infos[name], hint=size)
    functional = functionalize(program)
    translator = LoopTranslator(functional, symbols)
    results = translator.run()
    graph = translator.graph
    graph.dims.update(symbols.infos)
    graph.conditions = tuple(c for c in limits.conditions if unequal(c) is None)
    signature = functional.program.graph_signature
    outputs = set_outputs(graph, program.call_spec.out_spec, signature, results)
    pairs = take_pairs(graph)
    return Captured(
        graph,
        tuple(value.name for value in graph.inputs),
        outputs.names,
        {
            (position, axis): str(dim)
            for position, value in enumerate(graph.inputs)
            for axis, dim in enumerate(value.shape)
            if isinstance(dim, sympy.Symbol)
        },
        tuple(as_pairs(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)),
        Signature.of(
            parameters, sample, outputs.spec, outputs.constants, outputs.numbers, outputs.complexes
        ),
        sample,
        (
            *traced.notes,
            *map(replayed_note, traced.replayed),
            *map(left_out_note, traced.unrounded),
            *map(whole_note, traced.whole),
            *map(all_places_note, sorted(traced.hits.places) if traced.hits else ()),
            *limits.notes,
            *pairs,
            *map(unread_note, unread),
            *map(taken_apart_note, dict.fromkeys(names_of_known(outputs.spec))),
            *mutation_notes(functional.program, module),
            *wrapped_notes(translator.wrapped),
            *conditional_notes(functional.program.graph_module),
            *requirement_notes(functional.program),
        ),
        tuple(filter(None, map(unequal, limits.conditions))),
        limits.suspects,
        limits.demanded,
        traced.branches,
        traced.notes,
        traced.refusal,
        traced.opened,
        traced.jumps,
        traced.hits,
        tuple(translator.asked),
        limits.partings,
    )


def _limits(traced: Traced, symbols: Symbols, demanded: Sequence[Condition]) -> Limits:
    """Raises torch's refusal if what it demands is required."""
    env = shape_env(traced.program)
    questions = [
        question if env is None else replace(question, condition=env.simplify(question.condition))
        for question in traced.questions
    ]
    parts = [
        (symbols.renamed(size if env is None else env.simplify(size)), least)
        for size, least in traced.parts
        if traced.opened and not symbols.unnamed([size])
    ]
    limits = settled_limits(
        symbols,
        demanded,
        traced.asked,
        questions,
        resampled=bool(traced.resampled),
        refusal=traced.refusal,
        parts=parts,
        unguarded=traced.most + 1 if traced.most else 0,
    )
    if traced.refusal is not None and limits.required():
        raise traced.refusal
    return limits


def _in_signature_order(module: torch.nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    order = {name: i for i, name in enumerate(inspect.signature(module.forward).parameters)}
    return dict(sorted(kwargs.items(), key=lambda item: order.get(item[0], len(order))))


def _in_program_order(program: ExportedProgram, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    spec = program.call_spec.in_spec
    keys = spec.children()[1].context if spec is not None else None
    known = keys if isinstance(keys, list) and set(keys) == set(kwargs) else list(kwargs)
    return {name: kwargs[name] for name in known}


def _distinct(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """One tensor given for several inputs, once each: torch.export would take them for one."""
    seen: set[int] = set()

    def separate(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or id(leaf) not in seen:
            seen.add(id(leaf))
            return leaf
        return leaf.clone()

    separated: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(separate, (args, kwargs))
    return separated
