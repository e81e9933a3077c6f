"""The options of a compile as keywords, for every function that compiles.

A type checker wants their names and types written down; tests/unit/test_options.py compares them
with the fields of `Options` and `DecoderOptions`, from where the defaults come.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from inspect import Parameter
from pathlib import Path
from typing import Any, ParamSpec, TypedDict, TypeVar, get_type_hints

from attngraph.export.formats import Activations, Precision, Weights
from attngraph.options import CacheKind, DecoderOptions, Options, Runtime, Verify

_P = ParamSpec("_P")
_R = TypeVar("_R")


class CompileKeywords(TypedDict, total=False):
    """What every model may be compiled with: the fields of `Options` of these names."""

    target: str
    precision: Precision | None
    verify: Verify
    exact: bool
    tune: bool
    assume: Collection[str]
    weights: Weights | None
    activations: Activations | None
    budget: str | None
    calibrate: Path | None
    portable: bool
    opset: int
    single_file: bool


class EncoderKeywords(CompileKeywords, total=False):
    """What a model that keeps no cache may be compiled with."""

    ignore_padded_rows: bool


class CacheKeywords(CompileKeywords, total=False):
    """What a model that keeps a cache may be compiled with."""

    cache: CacheKind
    max_length: int | None


class DecoderKeywords(CacheKeywords, total=False):
    """What a decoder that is a single graph takes as well: the other fields of `DecoderOptions`."""

    presents: Mapping[str, str] | None
    all_logits: bool
    padding: bool
    position_ids: bool


class CheckpointKeywords(EncoderKeywords, CacheKeywords, total=False):
    """What a checkpoint's model may be compiled with, which is either kind, as its folder says."""

    all_logits: bool
    padding: bool
    position_ids: bool
    runtime: Runtime | None


def read(keywords: Any) -> tuple[Options, DecoderOptions]:
    """The options that keywords stand for. Raises UsageError for an unknown value."""
    of_cache = {field.name for field in fields(DecoderOptions)}
    own = {name: keywords[name] for name in keywords.keys() & of_cache}
    rest = {name: keywords[name] for name in keywords.keys() - of_cache}
    return Options(**rest), DecoderOptions(**own)


def spelled_out(keywords: type[CompileKeywords]) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Gives a function that takes `**options` a signature that names these, with their defaults.

    `help` and editors show it, and a name that it lacks is a TypeError where it is called.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        signature = _with_names(inspect.signature(function), keywords)

        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{function.__name__}() {error}") from None
            return function(*args, **kwargs)

        vars(call)["__signature__"] = signature
        return call

    return decorate


def _with_names(signature: inspect.Signature, keywords: type[CompileKeywords]) -> inspect.Signature:
    declared = (*fields(Options), *fields(DecoderOptions))
    defaults = {field.name: field.default for field in declared}
    own = [p for p in signature.parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
    named = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=defaults[name], annotation=hint)
        for name, hint in get_type_hints(keywords).items()
    ]
    return signature.replace(parameters=[*own, *named])
