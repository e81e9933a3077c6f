"""The driver for decoders: one graph for the prompt and the steps, checked over both."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from attngraph.checks.check import Cases
from attngraph.checks.probing import roles_of
from attngraph.checks.weight_only import reference_of
from attngraph.compiling.compilation import Prepared, Progress, stage
from attngraph.compiling.compiler import compile_model
from attngraph.decoding.decoder import Decoder
from attngraph.decoding.lengths import Lengths, lengths_of
from attngraph.decoding.tokens import positions
from attngraph.errors import ParityError, UsageError
from attngraph.export.files.staged import Staged
from attngraph.export.formats import Precision, Weights
from attngraph.export.lowering.emission.buffers import LENGTH, Buffers
from attngraph.export.parity.budget import Parity, compare, merge
from attngraph.export.parity.reference import Reference, ReferenceOutputs
from attngraph.export.precision import own_precision
from attngraph.frontend.cache import Layout, find_layout
from attngraph.frontend.capture import Captured
from attngraph.frontend.causal_lm import CausalLM, UnpaddedCausalLM, is_causal_lm
from attngraph.frontend.model import Model
from attngraph.ir import Graph
from attngraph.ir.conditions import shown
from attngraph.ir.ranges import Ranges
from attngraph.mapped import release_large
from attngraph.options import (
    DECODER_DEFAULTS,
    DEFAULTS,
    CacheKind,
    DecoderOptions,
    Options,
    Verify,
)

# (batch, seq, past) of prompts, of a later part of one, and of a step. A dozen tokens or more each:
# the rounding errors of one token go together, and those of a few are no measure for a budget.
_SIZES = ((5, 6, 0), (1, 13, 0), (4, 5, 3), (12, 1, 7))
_ROWS, _PROMPT, _STEPS = 4, 5, 3


def optimize_decoder(
    module: torch.nn.Module,
    args: tuple[Any, ...] | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    cache: CacheKind = "growing",
    max_length: int | None = None,
    presents: Mapping[str, str] | None = None,
    all_logits: bool = False,
    padding: bool = True,
    target: str = "cpu",
    precision: Precision | None = None,
    verify: Verify = "final",
    exact: bool = False,
    tune: bool = False,
    assume: Collection[str] = (),
    weights: Weights | None = None,
    progress: Progress | None = None,
) -> Decoder:
    """Compiles a causal language model with its key-value cache, and checks it over several steps.

    A model of transformers needs no `args`; its graph gives the logits of the last position, or
    with `all_logits` of all. Without `padding` it takes no mask, which leaves faster kernels to a
    step on CUDA, and no row may be padded. Any other module takes its past as tensors and returns
    them joined to what is new: `args` are samples and `dynamic_shapes` torch.export's, with dims
    for batch, new and past tokens; `presents` names the output of each past where it isn't plain
    (`find_layout`).

    `cache` is "growing", where a step makes new tensors one token longer, or "static": buffers of
    `max_length` tokens, which a step writes into where they lie.

    Raises UsageError where no cache is found or it can't be static, and as `optimize` does.
    """
    decoding = DecoderOptions(cache, max_length, presents)
    options = Options(
        target=target,
        precision=precision,
        verify=verify,
        exact=exact,
        tune=tune,
        assume=assume,
        weights=weights,
    )
    name = type(module).__name__
    if args is None and not kwargs:
        model = Model(module, None, (), {}, None, name)
        model = of_causal_lm(model, all_logits=all_logits, padding=padding)
    else:
        samples = () if args is None else args
        model = Model(module, None, samples, dict(kwargs or {}), dynamic_shapes, name)
    return compile_decoder(model, decoding, options, progress=progress)


def of_causal_lm(model: Model, *, all_logits: bool = False, padding: bool = True) -> Model:
    """A model of transformers with its cache as inputs and outputs. Raises UsageError."""
    if model.module is None or not is_causal_lm(model.module):
        raise UsageError(
            f"The cache of {model.source} can't be found: it is no causal language model of "
            "transformers. Give sample inputs, its past among them."
        )
    wrap: type[CausalLM | UnpaddedCausalLM] = CausalLM if padding else UnpaddedCausalLM
    wrapper = wrap(model.module, all_logits=all_logits)
    args, shapes = wrapper.sample()
    return replace(
        model,
        module=wrapper,
        args=args,
        kwargs={},
        dynamic_shapes=shapes,
        names=wrapper.names,
    )


def compile_decoder(
    model: Model,
    decoding: DecoderOptions = DECODER_DEFAULTS,
    options: Options = DEFAULTS,
    *,
    staged: Staged | None = None,
    progress: Progress | None = None,
) -> Decoder:
    """As `optimize_decoder`, for a model whose inputs and outputs already hold its cache."""
    seen: list[tuple[Captured, Layout, Lengths, list[str]]] = []

    def prepare(captured: Captured) -> Prepared:
        graph = captured.graph
        layout = find_layout(graph, decoding.presents, model.source)
        if decoding.max_length is not None:
            axes = token_axes(graph, layout)
            layout = replace(layout, max_length=decoding.max_length, axes=axes)
            if layout.mask is None:
                taken = {*captured.input_names, *captured.output_names}
                names = (f"{LENGTH}{'_' * count}" for count in range(len(taken) + 1))
                length = next(name for name in names if name not in taken)
                layout = replace(layout, length=length)
        graph.dims[layout.past] = replace(graph.dims[layout.past], low=0)
        lengths = lengths_of(graph, layout)
        layout = lengths.told(layout)
        _require_a_cache(layout, model.source)
        seen.append((captured, layout, lengths, lengths.notes(graph, layout)))
        cases = decoding_cases(captured, layout, lengths)
        return Prepared(cases, buffers_of(layout), inputs_at(captured, layout))

    optimized = compile_model(
        model,
        replace(options, decodes=True),
        prepare=prepare,
        staged=staged,
        progress=progress,
    )
    ((captured, layout, lengths, notes),) = seen
    decoder, report = Decoder.of(optimized, layout), optimized.report
    if not options.verifies:
        return decoder
    report.notes += notes
    with stage("decode", report, progress):
        stored = None if options.weights is None else optimized.graph
        parity = generated_parity(model, captured, decoder, report.precision, lengths, stored)
    if not parity.passed:
        raise ParityError(
            f"Decoding with {model.source} step by step is out of its error budget: {parity}. "
            "If its pasts and presents were paired wrongly, name them: "
            'presents={"past": "present"}, or --present past=present. Nothing was written.'
        )
    if report.parity is not None:
        report.parity = merge({"": report.parity, "decoding": parity})
    return decoder


def _require_a_cache(layout: Layout, source: str) -> None:
    """Raises UsageError where each token changes what a cache holds of those before it."""
    if layout.last is not None and layout.last < _PROMPT:
        raise UsageError(
            f"{source} can't be decoded with a cache: from {layout.last + 1} tokens on, each new "
            "one changes the keys and values of those before it. Compile it without a cache."
        )


def buffers_of(layout: Layout) -> Buffers | None:
    """The static cache of a decoder, if it has one."""
    if layout.max_length is None:
        return None
    presents = dict(zip(layout.pasts, layout.presents, strict=True))
    axes = dict(zip(layout.pasts, layout.axes or [2] * len(layout.pasts), strict=True))
    mask = layout.mask if layout.length is None else None
    return Buffers(presents, layout.past, layout.ids, axes, mask, layout.length)


def token_axes(graph: Graph, layout: Layout) -> tuple[int, ...]:
    """Along which axis each past counts its tokens."""
    shapes = {value.name: [str(dim) for dim in value.shape] for value in graph.inputs}
    return tuple(shapes[name].index(layout.past) for name in layout.pasts)


class _Inputs:
    """Inputs of a decoder at any size, from the samples it was captured with."""

    def __init__(self, captured: Captured, layout: Layout) -> None:
        self.layout = layout
        self.graph: Graph = captured.graph
        self.shapes = {value.name: value.shape for value in captured.graph.inputs}
        self.dtypes = {value.name: value.dtype for value in captured.graph.inputs}
        samples = dict(zip(captured.input_names, captured.args, strict=True))
        ids = captured.input_names.index(layout.ids)
        rows = roles_of(captured.graph, captured.args)[ids].rows
        self.tokens = rows or max(int(samples[layout.ids].max()) + 1, 2)
        self.random = torch.Generator().manual_seed(0)

    def ids(self, batch: int, length: int) -> torch.Tensor:
        drawn = torch.randint(self.tokens, (batch, length), generator=self.random)
        return drawn.to(self.dtypes[self.layout.ids])

    def mask(self, batch: int, length: int) -> torch.Tensor:
        """Row b is padded on the left by b, as far as it has room; the last of three or more rows
        has a hole behind its first token as well.
        """
        padding = torch.arange(batch)[:, None].clamp_max(length - 1)
        mask = torch.arange(length)[None] >= padding
        if batch > 2 and length > batch + 2:
            mask[-1, batch + 1] = False
        return mask

    def mask_of_steps(self, batch: int, length: int) -> torch.Tensor:
        """One that `Decoder` takes: without a mask no row is padded, and with one row of positions
        all are alike."""
        layout = self.layout
        if layout.mask is None:
            return torch.ones(batch, length, dtype=torch.bool)
        mask = self.mask(batch, length)
        return mask[:2][-1:].expand(batch, length) if self.shares_positions else mask

    @property
    def shares_positions(self) -> bool:
        """Whether the model takes one row of positions for the whole batch."""
        name = self.layout.positions
        return name is not None and [*map(str, self.shapes[name][:-1])] != [self.layout.batch]

    def all(self, ids: torch.Tensor, mask: torch.Tensor, past: int) -> tuple[torch.Tensor, ...]:
        """Every input of the graph, in its order; the past is random."""
        layout = self.layout
        sizes = {layout.batch: ids.shape[0], layout.past: past}
        given = {layout.ids: ids}
        if layout.mask is not None:
            given[layout.mask] = mask.to(self.dtypes[layout.mask])
        if layout.positions is not None:
            places = positions(mask, past, ids.shape[1])
            if self.shares_positions:
                is_alike = bool((places == places[0]).all())
                row = places[:1] if is_alike else positions(None, past, ids.shape[1])
                places = row if len(self.shapes[layout.positions]) == 2 else row[0]
            given[layout.positions] = places.to(self.dtypes[layout.positions])
        for name in layout.pasts:
            shape = [dim if isinstance(dim, int) else sizes[str(dim)] for dim in self.shapes[name]]
            given[name] = torch.randn(shape, generator=self.random).to(self.dtypes[name])
        return tuple(given[value.name] for value in self.graph.inputs)


def decoding_cases(captured: Captured, layout: Layout, lengths: Lengths) -> Cases:
    """A prompt, a part of one and steps, padded on the left, of sizes that the model takes.

    And the same on both sides of, and across, each length at which something changes.
    """
    inputs = _Inputs(captured, layout)
    seq = str(inputs.shapes[layout.ids][1])
    limits = Ranges.of(captured.graph)
    cases = {}
    names = (layout.batch, seq, layout.past)
    across = lengths.across(captured.graph, layout)
    for sizes in (*_SIZES, *across):
        fitting = _fitting(limits, names, sizes)
        if fitting is None or (sizes in across and fitting != sizes):
            continue
        batch, length, past = fitting
        padding = inputs.mask(batch, past + length)
        label = f"batch={batch}, seq={length}, past={past}"
        cases[label] = inputs.all(inputs.ids(batch, length), padding, past)
    if not cases:
        required = ", ".join(map(shown, limits.limits()))
        raise UsageError(
            f"The model can't be decoded with: its sizes must have {required}, which neither a "
            "prompt nor a step of a few tokens has."
        )
    return cases


def _fitting(
    limits: Ranges, names: tuple[str, str, str], sizes: tuple[int, int, int]
) -> tuple[int, int, int] | None:
    """(batch, seq, past), each no larger than given, or None where the model takes none of them."""
    batch, length, past = sizes
    smaller = itertools.product(range(batch, 0, -1), range(past, -1, -1), range(length, 0, -1))
    for rows, before, new in smaller:
        if not limits.broken(dict(zip(names, (rows, new, before), strict=True))):
            return rows, new, before
    return None


def inputs_at(
    captured: Captured, layout: Layout
) -> Callable[[Mapping[str, int]], tuple[torch.Tensor, ...]]:
    """A function from sizes of the batch, the new tokens and the past to inputs."""
    inputs = _Inputs(captured, layout)
    seq = str(inputs.shapes[layout.ids][1])

    def at(sizes: Mapping[str, int]) -> tuple[torch.Tensor, ...]:
        batch, length = sizes[layout.batch], sizes[seq]
        past = sizes[layout.past]
        return inputs.all(inputs.ids(batch, length), inputs.mask(batch, past + length), past)

    return at


def generated_parity(
    model: Model,
    captured: Captured,
    decoder: Decoder,
    precision: Precision,
    changes: Lengths,
    stored: Graph | None = None,
) -> Parity:
    """The last logits of a prompt and of a few steps, against the eager model on all tokens so far.

    The steps go on across each length at which something changes, if that is not too far. The eager
    model computes each without a cache, so that a cache handed on wrongly shows. With quantized
    weights the graph that has them, `stored`, takes its place.
    """
    layout, inputs = decoder.layout, _Inputs(captured, decoder.layout)
    module = model.module
    if module is None and model.program is not None:
        module = model.program.module()
    assert module is not None
    converted = precision != own_precision(captured.graph)
    if stored is None:
        reference = Reference(module, precision=precision, converted=converted)
    else:
        reference = reference_of(stored, precision)
    most = changes.end(captured.graph, layout)
    end = min(_PROMPT + _STEPS, most)
    fitting = (n for n in range(2, end + 1) if decoder.takes(_ROWS, min(_PROMPT, n - 1), n))
    end = max(fitting, default=end)
    first = min(_PROMPT, end - 1)
    further = changes.steps(captured.graph, layout, _ROWS, first)
    taken = {n for n in further if decoder.takes(_ROWS, first, n) and decoder.takes(_ROWS, n, n)}
    lengths = sorted({*range(first, end + 1)} | taken)
    whole, mask = inputs.ids(_ROWS, lengths[-1]), inputs.mask_of_steps(_ROWS, lengths[-1])
    expected: list[ReferenceOutputs] = []
    for length in lengths:
        given_all = inputs.all(whole[:, :length], mask[:, :length], 0)
        args, kwargs = captured.call(given_all) if stored is None else (given_all, {})
        expected.append(_last_logits(reference(args, kwargs), captured, layout))
    release_large(reference.module)  # before the session has a copy of them
    state, done = None, 0
    found: list[torch.Tensor] = []
    for length in lengths:
        given = mask[:, :length] if layout.mask is not None else None
        logits, state = decoder(whole[:, done:length], given, state)
        found.append(logits[:, -1:])
        done = length
    joined, outputs = _joined(expected), (torch.cat(found, 1),)
    return compare(joined, joined.in_its_dtypes(outputs) if converted else outputs, precision)


def _last_logits(outputs: ReferenceOutputs, captured: Captured, layout: Layout) -> ReferenceOutputs:
    place = captured.output_names.index(layout.logits)

    def cut(tensors: Sequence[Any]) -> tuple[Any, ...]:
        return (None if tensors[place] is None else tensors[place][:, -1:],)

    return ReferenceOutputs(
        (layout.logits,),
        cut(outputs.eager),
        cut(outputs.exact),
        outputs.note,
        lambda: tuple(cut(run) for run in outputs.sample()),
    )


def _joined(steps: Sequence[ReferenceOutputs]) -> ReferenceOutputs:
    """One output (B, steps, V) of one for each step; without float64 where a step has none."""
    exact = [step.exact[0] for step in steps if step.exact[0] is not None]

    def sample() -> tuple[tuple[torch.Tensor, ...], ...]:
        runs = zip(*(step.sample() for step in steps), strict=True)
        return tuple((torch.cat([tensor for (tensor,) in run], 1),) for run in runs)

    return ReferenceOutputs(
        steps[0].names,
        (torch.cat([step.eager[0] for step in steps], 1),),
        (torch.cat(exact, 1) if len(exact) == len(steps) else None,),
        next((step.note for step in steps if step.note), ""),
        sample,
    )
