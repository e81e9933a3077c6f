"""The names of a model's file, factory and samples, checked without torch and so at once."""

from __future__ import annotations

from pathlib import Path

from attngraph.errors import LoadError, UsageError
from attngraph.frontend.files.sniff import ModelKind, sniff


def kind_of(path: Path | None, factory: str | None) -> ModelKind | None:
    """The kind of a model's file, None for a factory alone.

    Raises LoadError where the file is missing or no model's, UsageError where no model is named,
    or by a file and a factory that don't go together.
    """
    if factory is not None:
        split_factory(factory)
    if path is None:
        if factory is None:
            raise UsageError("There is no model: give a model file, or --factory pkg.mod:fn.")
        return None
    kind = sniff(path)
    if kind is ModelKind.UNKNOWN:
        what = "is not a model file attngraph reads; give"
        if path.suffix == ".onnx":
            what = "is an ONNX file, which attngraph writes; give the model it was made from:"
        raise LoadError(
            f"{path} {what} a torch.export program (.pt2), TorchScript, or what torch.save or "
            "safetensors wrote."
        )
    if kind in (ModelKind.EXPORTED_PROGRAM, ModelKind.TORCHSCRIPT):
        refuse_factory(path, kind.value, factory)
    if kind is ModelKind.SAFETENSORS:
        require_factory(path, factory)
    if kind is ModelKind.CHECKPOINT and factory is not None:
        refuse_factory(path, kind.value, factory)
    return kind


def split_factory(spec: str) -> tuple[str, str]:
    """The module and the function of `pkg.mod:fn`. Raises UsageError for another form."""
    module, colon, name = spec.partition(":")
    if not (module and colon and name):
        raise UsageError(
            f"--factory {spec!r} is not of the form pkg.mod:fn, e.g. examples.gpt:build."
        )
    return module, name


def require_factory(path: Path, factory: str | None) -> str:
    """The factory that weights need. Raises LoadError where there is none."""
    if factory is None:
        raise LoadError(
            f"{path} holds weights but no model; pass --factory pkg.mod:fn, a function that builds "
            "the module they belong to."
        )
    return factory


def refuse_factory(path: Path, what: str, factory: str | None) -> None:
    """Raises UsageError where a file that holds a model comes with a factory."""
    if factory is not None:
        raise UsageError(
            f"{path} is {what} and brings its own model; leave out --factory {factory}, or give a "
            "state dict or safetensors file to go with it."
        )


def require_samples(path: Path) -> None:
    """Raises LoadError where `--inputs` names no file, or it is out of reach."""
    try:
        path.stat()
    except FileNotFoundError as error:
        raise LoadError(f"--inputs {path} does not exist; check the path.") from error
    except OSError as error:
        raise LoadError(f"--inputs {path} can't be read: {error.strerror}.") from error
