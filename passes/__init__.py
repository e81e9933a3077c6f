"""Graph passes: analyses and rewrites, one per file. A pass registers itself when it is imported,
and every file here is.
"""

import importlib
import pkgutil

import attngraph.dialect  # noqa: F401  (the passes emit its ops)
from attngraph.passes.rewriting.manager import (
    GraphPass,
    Pass,
    PassResult,
    label_of,
    make,
    only_exact,
    purpose_of,
    registered,
    run,
)

for _file in pkgutil.walk_packages(__path__, f"{__name__}."):
    importlib.import_module(_file.name)

__all__ = [
    "GraphPass",
    "Pass",
    "PassResult",
    "label_of",
    "make",
    "only_exact",
    "purpose_of",
    "registered",
    "run",
]
