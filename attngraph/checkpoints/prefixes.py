"""What wrappers and training loops put before the names of a model's weights."""

from __future__ import annotations

from collections.abc import Collection

_PREFIXES = ("module.", "_orig_mod.", "model.", "_forward_module.", "net.", "network.")


def shared_prefixes(names: Collection[str]) -> list[str]:
    """What stands before every name and is what wrappers put there: `module.`, `module.model.`."""
    found: list[str] = []
    while True:
        known = found[-1] if found else ""
        begins = (known + part for part in _PREFIXES)
        longer = next((p for p in begins if all(name.startswith(p) for name in names)), None)
        if longer is None or not names:
            return found
        found.append(longer)


def taken_off(prefix: str) -> str:
    """The sentence that tells it."""
    return f"The names of the weights begin with {prefix!r}, which was taken off."
