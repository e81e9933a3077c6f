"""Prints what the installed onnxruntime computes otherwise than PyTorch.

`python -m tests.kernels [CASE ...]` runs all cases, or those named. It says which known difference
is none any more, which case differs that did not, and what is refused. The known ones are those of
the CPU provider; `--target cuda` runs the cases on CUDA's, and `--results FILE.json` keeps all that
it says, with the operators that ran on another provider.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import onnxruntime
import torch

from attngraph.ir.types import dtype_name
from tests.kernels.runner import Found, observe
from tests.kernels.table import CASES


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kernels", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="names of cases")
    parser.add_argument("--target", default="cpu", help="such as cuda")
    parser.add_argument("--dtype", help="such as bf16; all if not given")
    parser.add_argument("--results", type=Path, metavar="FILE.json")
    options = parser.parse_args()
    names = options.cases or list(CASES)
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"no case is named {', '.join(unknown)}; tests/kernels/table.py has them")
    warnings.simplefilter("ignore")
    versions = f"onnxruntime {onnxruntime.__version__}, torch {torch.__version__}"
    print(f"{versions}, {torch.backends.cpu.get_cpu_capability()}")
    kinds: dict[str, list[Found]] = {}
    for name in names:
        for dtype in CASES[name].dtypes:
            if options.dtype not in (None, dtype_name(dtype)):
                continue
            found = observe(CASES[name], dtype, options.target)
            kind = found.kind
            if kind == "differs":
                kind = "differs, as known" if found.is_as_known else "DIFFERS"
            elif not found.is_as_known:
                kind = "DIFFERS NO MORE"
            kinds.setdefault(kind, []).append(found)
            if kind not in ("same", "none"):
                print(f"{kind}: {found}")
        if options.results is not None:  # as it goes: a kernel may end the process
            told = {kind: [_row(one) for one in found] for kind, found in kinds.items()}
            options.results.write_text(json.dumps({"versions": versions, **told}, indent=1) + "\n")
    print(", ".join(f"{len(found)} {kind}" for kind, found in sorted(kinds.items())))
    return int("DIFFERS" in kinds or "DIFFERS NO MORE" in kinds)


def _row(found: Found) -> dict[str, Any]:
    said = {"detail": found.detail, "elsewhere": found.elsewhere}
    return {"case": found.case.name, "dtype": dtype_name(found.dtype), **said}


if __name__ == "__main__":
    sys.exit(main())
