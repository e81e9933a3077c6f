"""The driver for decoders: one graph for the prompt and the steps, checked over both."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, Unpack

import sympy
import torch

from attngraph.compiling.beginning import Prepared, stage
from attngraph.compiling.compiler import compile_model
from attngraph.decoding.checking import PROMPT, Encoded, decoding_cases, generated_parity, inputs_at
from attngraph.decoding.decoder import Decoder
from attngraph.decoding.lengths import Lengths, lengths_of
from attngraph.errors import CaptureError, ParityError, UsageError, listed
from attngraph.export.files.staged import Staged
from attngraph.export.lowering.emission.buffers import LENGTH, Buffers, axes_of_rows
from attngraph.export.parity.budget import merge
from attngraph.frontend.capture import Captured
from attngraph.frontend.families.cache import Layout, find_layout
from attngraph.frontend.families.causal_lm import (
    CausalLM,
    PlacedCausalLM,
    UnpaddedCausalLM,
    is_causal_lm,
)
from attngraph.frontend.families.embedded_lm import CachedEmbeds
from attngraph.frontend.families.kept import kept_states
from attngraph.frontend.families.own_states import states_of_modules
from attngraph.frontend.families.stateful_lm import Stateful
from attngraph.frontend.families.tried_forms import stateful
from attngraph.frontend.interface.wrappers import adapters
from attngraph.frontend.model import Model
from attngraph.ir import Graph
from attngraph.keywords import DecoderKeywords, read, spelled_out
from attngraph.options import DECODER_DEFAULTS, DEFAULTS, DecoderOptions, Options
from attngraph.stages import Progress, telling


@spelled_out(DecoderKeywords)
def optimize_decoder(
    module: torch.nn.Module,
    args: tuple[Any, ...] | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    progress: Progress | None = None,
    **options: Unpack[DecoderKeywords],
) -> Decoder:
    """Compiles a causal language model with its key-value cache, and checks it over several steps.

    A model of transformers needs no `args`; its graph gives the logits of the last position, or
    with `all_logits` of all. Without `padding` it takes no mask, which leaves faster kernels to a
    step on CUDA, and no row may be padded. With `position_ids` it takes positions (B, S) beside the
    mask, which otherwise says where tokens stand. Any other module takes its past as tensors and
    returns them joined to what is new, and states of one size, zero before the first token, as they
    are then: `args` are samples and `dynamic_shapes` torch.export's, with dims for batch, new and
    past tokens; `presents` names the output of each past where it isn't plain (`find_layout`).

    `cache` is "growing", where a step makes new tensors one token longer, or "static": buffers of
    `max_length` tokens, which a step writes into where they lie.

    Raises UsageError where no cache is found or it can't be static, and as `optimize` does.
    """
    chosen, decoding = read(options)
    name = type(module).__name__
    if args is None and not kwargs:
        model = of_causal_lm(Model.of_module(module, source=name), decoding)
    else:
        samples = () if args is None else args
        model = Model(module, None, samples, dict(kwargs or {}), dynamic_shapes, name)
    with telling(progress):
        return compile_decoder(model, decoding, chosen)


def of_causal_lm(
    model: Model, decoding: DecoderOptions = DECODER_DEFAULTS, *, by_token: bool = False
) -> Model:
    """A model of transformers with its cache as inputs and outputs. Raises UsageError.

    One that keeps states takes one token a call if `by_token`, or where it can't take several.
    """
    if model.module is None or not is_causal_lm(model.module):
        raise UsageError(
            f"The cache of {model.source} can't be found: it is no causal language model of "
            "transformers. Give sample inputs, its past among them."
            f"{adapters(model.module)}"
        )
    wrap: type[CausalLM | UnpaddedCausalLM] = CausalLM if decoding.padding else UnpaddedCausalLM
    wrap = PlacedCausalLM if decoding.position_ids else wrap
    every = decoding.gives_all_logits
    try:
        return _wrapped(model, wrap(model.module, all_logits=every))
    except UsageError as error:
        if (kept := kept_states(model.module)) is None:
            if decoding.position_ids:
                raise
            if names := states_of_modules(model.module):
                raise UsageError(
                    f"{model.source} can't be decoded with its cache: it keeps states in its own "
                    f"modules ({listed(names)}), where no call can be given those of another."
                ) from error
            raise error
    if decoding.position_ids:
        raise UsageError(
            f"{model.source} keeps states, and where its tokens stand is left to its mask: leave "
            "out --position-ids."
        )
    wrapper, notes = stateful(
        model.module, kept, all_logits=every, padding=decoding.padding, by_token=by_token
    )
    return replace(_wrapped(model, wrapper), notes=(*model.notes, *notes))


def _wrapped(model: Model, wrapper: Any) -> Model:
    args, shapes = wrapper.sample()
    return replace(
        model, module=wrapper, args=args, kwargs={}, dynamic_shapes=shapes, names=wrapper.names
    )


def compile_decoder(
    model: Model,
    decoding: DecoderOptions = DECODER_DEFAULTS,
    options: Options = DEFAULTS,
    *,
    memory: Collection[str] = (),
    encoded: Callable[[Decoder], Iterable[Encoded | None]] | None = None,
    staged: Staged | None = None,
) -> Decoder:
    """As `optimize_decoder`, for a model whose inputs and outputs already hold its cache.

    `memory` are the inputs that stay the same in all steps; `encoded` gives what they are where the
    steps are compared with the eager model. A model with states that can't be traced for a prompt
    of any length is compiled for one token a call.
    """
    given = functools.partial(
        _compile_decoder,
        decoding=decoding,
        options=options,
        memory=memory,
        encoded=encoded,
        staged=staged,
    )
    module = model.module
    if not isinstance(module, Stateful) or module.by_token:
        return given(model)
    try:
        return given(model)
    except CaptureError as error:
        reason = str(error)
    stepwise = _wrapped(model, module.one_token_a_call())
    note = f"A prompt is fed token by token, as several can't be traced for every length: {reason}"
    return given(replace(stepwise, notes=(*model.notes, note)))


def _compile_decoder(
    model: Model,
    decoding: DecoderOptions,
    options: Options,
    memory: Collection[str],
    encoded: Callable[[Decoder], Iterable[Encoded | None]] | None,
    staged: Staged | None,
) -> Decoder:
    seen: list[tuple[Captured, Layout, Lengths, list[str]]] = []

    def prepare(captured: Captured) -> Prepared:
        graph = captured.graph
        if isinstance(model.module, Stateful | CachedEmbeds):
            layout = model.module.layout(graph)
        else:
            layout = find_layout(graph, decoding.presents, model.source, memory)
        if decoding.max_length is not None:
            _require_room_is_used(graph, layout, model.source)
            axes = token_axes(graph, layout)
            layout = replace(layout, max_length=decoding.max_length, axes=axes)
            if layout.mask is None:
                taken = {*captured.input_names, *captured.output_names}
                names = (f"{LENGTH}{'_' * count}" for count in range(len(taken) + 1))
                length = next(name for name in names if name not in taken)
                layout = replace(layout, length=length)
        take_every_step(graph, layout)
        lengths = lengths_of(graph, layout)
        layout = lengths.told(layout)
        _require_a_cache(layout, model.source)
        seen[:] = [(captured, layout, lengths, lengths.notes(graph, layout))]
        cases = decoding_cases(captured, layout, lengths)
        return Prepared(cases, buffers_of(graph, layout), inputs_at(captured, layout))

    optimized = compile_model(
        model,
        replace(options, decodes=True),
        prepare=prepare,
        staged=staged,
    )
    ((captured, layout, lengths, notes),) = seen
    decoder, report = Decoder.of(optimized, layout), optimized.report
    report.notes += _notes_on_states(model, layout)
    if not options.verifies:
        return decoder
    report.notes += notes
    with stage("decode", report):
        stored = None if options.weights is None else optimized.graph
        parity = merge(
            {
                "" if given is None else given.label: generated_parity(
                    model, captured, decoder, report.precision, lengths, stored, given
                )
                for given in ([None] if encoded is None else encoded(decoder))
            }
        )
    if not parity.passed:
        forgets = (
            "If it doesn't go on from its states when several tokens come at once, or if they "
            "don't begin at zero, wrap it in a module that does. "
        )
        raise ParityError(
            f"Decoding with {model.source} step by step is out of its error budget: {parity}. "
            "If its pasts and presents were paired wrongly, name them: "
            'presents={"past": "present"}, or --present past=present. '
            f"{forgets if layout.states else ''}If its tokens see later ones of a prompt, it can't "
            "be decoded with a cache. Nothing was written."
        )
    if report.parity is not None:
        report.parity = merge({"": report.parity, "decoding": parity})
    return decoder


def _require_a_cache(layout: Layout, source: str) -> None:
    """Raises UsageError where each token changes what a cache holds of those before it."""
    if layout.last is not None and layout.last <= PROMPT:
        raise UsageError(
            f"{source} can't be decoded with a cache: from {layout.last + 1} tokens on, each new "
            "one changes the keys and values of those before it. Compile it without a cache."
        )


def _require_room_is_used(graph: Graph, layout: Layout, source: str) -> None:
    """Raises UsageError where a static cache would hold no keys, or no row of it can run alone."""
    if not layout.growing:
        raise UsageError(
            f"{source} keeps states alone, which have one size however many tokens came: there is "
            "nothing that needs the room of a static cache. Compile it with a growing one."
        )
    inputs = {value.name: value for value in graph.inputs}
    for name in layout.states:
        rows, *rest = inputs[name].shape
        if str(rows) != layout.batch or not rest:
            raise UsageError(
                f"The cache of {source} can't be static: the state {name} doesn't have its rows "
                "along its first axis of several. Compile it with a growing cache."
            )


def _notes_on_states(model: Model, layout: Layout) -> list[str]:
    """What is taken for granted of the states of a module that nobody ran to find them."""
    if not layout.states or isinstance(model.module, Stateful | CachedEmbeds):
        return []
    return [f"What a step replaces is zero before the first token: {', '.join(layout.states)}."]


def take_every_step(graph: Graph, layout: Layout) -> None:
    """Lets a captured graph begin without a past, and go on by one token.

    Where a model with states branches for one token, that is a piece like any other, and what the
    graph gives for it is compared with the model.
    """
    if layout.past:
        graph.dims[layout.past] = replace(graph.dims[layout.past], low=0)
    if not layout.states:
        return
    ids = next(value for value in graph.inputs if value.name == layout.ids)
    one = sympy.Ne(ids.shape[1], 1)
    graph.conditions = tuple(condition for condition in graph.conditions if condition != one)


def buffers_of(graph: Graph, layout: Layout) -> Buffers | None:
    """The static cache of a decoder, if it has one."""
    if layout.max_length is None:
        return None
    presents = layout.growing
    axes = dict(zip(presents, layout.axes or [2] * len(presents), strict=True))
    mask = layout.mask if layout.length is None else None
    rows = axes_of_rows({value.name: value.shape for value in graph.inputs}, layout.batch)
    return Buffers(presents, layout.past, layout.ids, axes, rows, mask, layout.length)


def token_axes(graph: Graph, layout: Layout) -> tuple[int, ...]:
    """Along which axis each past that is no state counts its tokens."""
    shapes = {value.name: [str(dim) for dim in value.shape] for value in graph.inputs}
    return tuple(shapes[name].index(layout.past) for name in layout.growing)
