"""The options that several commands share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from attngraph.errors import UsageError

_INPUTS = "Inputs"
_SESSION = "Session"

ModelArgument: TypeAlias = Annotated[
    Path | None,
    typer.Argument(
        metavar="MODEL",
        show_default=False,
        help="A torch.export program (.pt2), TorchScript, a pickled module, or weights (state dict "
        "or safetensors, with --factory). May be left out with --factory.",
    ),
]
FactoryOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--factory",
        metavar="PKG.MOD:FN",
        show_default=False,
        help="A function that returns a module, (module, args) or (module, args, dynamic_shapes).",
    ),
]
TrustOption: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--trust-pickle",
        help="Load a file that can run its author's code. Only for files you trust.",
    ),
]
InputOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        metavar="NAME=DTYPE[DIMS]",
        show_default=False,
        rich_help_panel=_INPUTS,
        help="A sample input, e.g. input_ids=int64\\[batch=2,seq=8]. A dim with a name is dynamic, "
        "and the same name is the same dim everywhere. Once for each input.",
    ),
]
NpzOption: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--inputs",
        metavar="SAMPLE.npz",
        show_default=False,
        rich_help_panel=_INPUTS,
        help="Sample inputs as arrays by name; --input then only names their dims.",
    ),
]
DimOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--dim",
        metavar="NAME=LOW..HIGH|INPUT:AXIS",
        show_default=False,
        rich_help_panel=_INPUTS,
        help="The sizes a named dim may take, e.g. seq=2..2048; or, of an exported program, the "
        "name of a dim, e.g. seq=input_ids:1. Once for each dim.",
    ),
]
AssumeOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--assume",
        metavar="ASSUMPTION",
        show_default=False,
        help="What to rely on without proof. no-fully-masked-rows: every query has a key, so a "
        "finite fill may count as -inf.",
    ),
]
TargetOption: TypeAlias = Annotated[
    str,
    typer.Option("--target", help="The machine it will run on: cpu, cuda, or e.g. cuda:sm80."),
]
ReportOption: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--report",
        metavar="OUT.html",
        show_default=False,
        help="Write a page about every attention, the passes and the error budget.",
    ),
]
ThreadsOption: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--threads",
        min=1,
        show_default=False,
        rich_help_panel=_SESSION,
        help="Threads of onnxruntime, by default as many as torch uses; in bench those of torch "
        "too.",
    ),
]
SpinningOption: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--spinning/--no-spinning",
        rich_help_panel=_SESSION,
        help="Whether onnxruntime's threads wait for work awake, which is faster and keeps cores "
        "from others.",
    ),
]
ProviderOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--provider-option",
        metavar="KEY=VALUE",
        show_default=False,
        rich_help_panel=_SESSION,
        help="An option of onnxruntime's provider, e.g. device_id=1. Once for each.",
    ),
]
JsonOption: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print one JSON object instead of text.")
]
DebugOption: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--debug",
        envvar="ATTNGRAPH_DEBUG",
        show_envvar=True,
        help="Show the traceback of an error, and the warnings of libraries.",
    ),
]


def session_settings(
    threads: int | None, spinning: bool, provider_options: list[str] | None
) -> dict[str, Any]:
    """Keyword arguments of `Session.open`, from the options as typer gives them.

    Raises UsageError for a provider option that is no KEY=VALUE, or is given twice.
    """
    given: dict[str, str] = {}
    for text in provider_options or ():
        key, sign, value = (part.strip() for part in text.partition("="))
        if not (key and sign and value):
            raise UsageError(
                f"--provider-option {text!r} doesn't parse; write KEY=VALUE, such as device_id=1."
            )
        if key in given:
            raise UsageError(f"--provider-option {key} was given twice.")
        given[key] = value
    return {"threads": threads, "spinning": spinning, "provider_options": given}


@dataclass(frozen=True)
class Source:
    """The options that say which model, and on what inputs."""

    path: Path | None
    factory: str | None
    trust_pickle: bool
    inputs: tuple[str, ...]
    npz: Path | None
    dims: tuple[str, ...]

    @classmethod
    def of(
        cls,
        path: Path | None,
        factory: str | None,
        trust_pickle: bool,
        inputs: list[str] | None,
        npz: Path | None,
        dims: list[str] | None,
    ) -> Source:
        """From the options as typer gives them."""
        return cls(path, factory, trust_pickle, tuple(inputs or ()), npz, tuple(dims or ()))
