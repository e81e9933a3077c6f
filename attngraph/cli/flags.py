"""The flags that several commands share, and groups of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, is_dataclass
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, TypeAlias, get_args, get_origin, get_type_hints

import typer

from attngraph.errors import UsageError
from attngraph.flag import Flag

_SESSION = "Session"


def switch(name: str, **settings: Any) -> Any:
    """An option without a value. Without a metavar typer's help would show the type `bool`."""
    return typer.Option(name, metavar="", **settings)


ModelArgument: TypeAlias = Annotated[
    Path | None,
    typer.Argument(
        metavar="MODEL",
        show_default=False,
        help="A checkpoint's folder (config.json and weights), a torch.export program (.pt2), "
        "TorchScript, a pickled module, or weights (state dict or safetensors, with --factory). "
        "May be left out with --factory.",
    ),
]
ReportOption: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--report",
        "--html",
        metavar="OUT.html",
        show_default=False,
        help="Write a page about every attention, the passes and the error budget.",
    ),
]
JsonOption: TypeAlias = Annotated[
    bool, switch("--json", help="Print one JSON object instead of text.")
]
DebugOption: TypeAlias = Annotated[
    bool,
    switch(
        "--debug",
        envvar="ATTNGRAPH_DEBUG",
        show_envvar=True,
        help="Show the traceback of an error, and the warnings of libraries.",
    ),
]


@dataclass(frozen=True)
class SessionFlags:
    """How onnxruntime runs."""

    threads: Annotated[
        int | None,
        Flag(
            "Threads of onnxruntime, by default as many as torch uses; in bench those of torch "
            "too.",
            metavar="COUNT",
            panel=_SESSION,
            least=1,
        ),
    ] = None
    no_spinning: Annotated[
        bool,
        Flag(
            "Let onnxruntime's threads sleep while they wait for work, which is slower and leaves "
            "cores to others.",
            panel=_SESSION,
        ),
    ] = False
    provider_options: Annotated[
        list[str] | None,
        Flag(
            "An option of onnxruntime's provider, e.g. device_id=1. Once for each.",
            metavar="KEY=VALUE",
            name="provider-option",
            panel=_SESSION,
        ),
    ] = None

    def settings(self) -> dict[str, Any]:
        """Keyword arguments of `Session.open`.

        Raises UsageError for a provider option that is no KEY=VALUE, or is given twice.
        """
        given = pairs(self.provider_options or (), "--provider-option", "KEY=VALUE", "device_id=1")
        return {
            "threads": self.threads,
            "spinning": not self.no_spinning,
            "provider_options": given,
        }


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose groups of flags and declared options are flags of typer.

    typer reads flags from a function's signature and knows no groups; so the signature is made. A
    parameter that is a dataclass stands for those of its fields that are flags. One that is a
    `partial` of a dataclass does as well; the command gives it the others, and may raise.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, tuple[type, list[Parameter]]] = {}
    flags: list[Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        hint = hints[name]
        is_partial = get_origin(hint) is functools.partial
        group = get_args(hint)[0] if is_partial else hint
        if isinstance(group, type) and is_dataclass(group):
            kinds = get_type_hints(group, include_extras=True)
            members = [
                _parameter(member.name, member.default, kinds[member.name])
                for member in fields(group)
                if _flag_of(kinds[member.name]) is not None
            ]
            groups[name] = (group, members)
            flags += members
        else:
            flags.append(_parameter(name, parameter.default, hint))

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for name, (group, members) in groups.items():
            values = {flag.name: given.pop(flag.name) for flag in members}
            values = {n: tuple(v) if isinstance(v, list) else v for n, v in values.items()}
            made = functools.partial(group, **values)
            given[name] = made if get_origin(hints[name]) is functools.partial else made()
        command(**given)

    run.__annotations__ = {flag.name: flag.annotation for flag in flags}
    vars(run)["__signature__"] = inspect.Signature(flags)
    return run


def _flag_of(hint: Any) -> Flag | None:
    found = (item for item in getattr(hint, "__metadata__", ()) if isinstance(item, Flag))
    return next(found, None)


def _parameter(name: str, default: Any, hint: Any) -> Parameter:
    """A flag as typer reads it; one that options.py declares is written in typer's words."""
    flag = _flag_of(hint)
    if flag is not None:
        kind, *_ = get_args(hint)
        kind = list[str] if kind in (Collection[str], tuple[str, ...]) else kind
        called = (flag.name or name).replace("_", "-")
        option = typer.Option(
            f" /--no-{called}" if default is True else f"--{called}",
            metavar="" if kind is bool else flag.metavar,
            show_default=default is not None and default is not True and default != (),
            help=flag.help,
            rich_help_panel=flag.panel,
            min=flag.least,
        )
        hint = Annotated[kind, option]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def pairs(texts: Sequence[str], option: str, form: str, example: str) -> dict[str, str]:
    """The KEY=VALUE pairs of an option that may be given several times, as a dict.

    Raises UsageError for one that doesn't parse, or is given twice.
    """
    found: dict[str, str] = {}
    for text in texts:
        key, sign, value = (part.strip() for part in text.partition("="))
        if not (key and sign and value):
            raise UsageError(f"{option} {text!r} doesn't parse; write {form}, such as {example}.")
        if key in found:
            raise UsageError(f"{option} {key} was given twice.")
        found[key] = value
    return found
