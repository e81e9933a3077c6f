"""The kernel table, and the choice it makes for each attention site."""

from __future__ import annotations

from attngraph.export.kernels.choice import Choice, check_version, choose, choose_all
from attngraph.export.kernels.facts import Facts, facts_of
from attngraph.export.kernels.table import Form

__all__ = ["Choice", "Facts", "Form", "check_version", "choose", "choose_all", "facts_of"]
