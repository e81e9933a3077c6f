"""One exception hierarchy, and the words that messages share.

Every message is a sentence that names the culprit and what to do next. The command line prints it
on one line and exits with `exit_code`; `--debug` shows the traceback.
"""

from __future__ import annotations

from collections.abc import Sequence


def reason_of(error: BaseException) -> str:
    """What another library's error says, in short: one line without a full stop."""
    said = " ".join(str(error).split())[:300].rstrip(".")
    kind = type(error).__name__
    if isinstance(error, KeyError):  # which says the key alone
        return f"{kind}: {said}"
    return said or kind


class AttngraphError(Exception):
    """Base of everything attngraph raises on purpose."""

    exit_code = 1


class UsageError(AttngraphError):
    """An option, an input spec or an argument is wrong."""

    exit_code = 2


class LoadError(AttngraphError):
    """A model file can't be read, is of the wrong kind, or is not safe to read."""

    exit_code = 3


class CaptureError(AttngraphError):
    """torch.export can't trace the model, or a requested dynamic dim specialised."""

    exit_code = 4


class SampleError(CaptureError):
    """The model itself fails on its sample inputs."""


class IRError(AttngraphError):
    """A graph breaks an invariant, or its text doesn't parse."""

    exit_code = 5


class LoweringError(AttngraphError):
    """An operator has no ONNX lowering."""

    exit_code = 6


class ProviderError(AttngraphError):
    """The execution provider that was asked for can't be used, and why."""

    exit_code = 7


class ParityError(AttngraphError):
    """The optimised model's output is out of its error budget; nothing was written."""

    exit_code = 8


class OutputError(AttngraphError):
    """The output path can't be written."""

    exit_code = 9


def first_line(error: BaseException) -> str:
    """The first line of another library's message, cut where it is very long."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def listed(names: Sequence[str], most: int = 3, joint: str = ", ") -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{joint.join(names[:most])}{more}"


def counted(count: int, what: str) -> str:
    """`1 node`, `3 nodes`."""
    return f"{count} {what}" + ("" if count == 1 else "s")
