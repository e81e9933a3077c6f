"""The wheel as a user gets it: python -m tests.wheel FOLDER (make wheel-test).

Builds it, installs it into an environment of its own, and runs its commands there. What it depends
on is that of the environment which runs this, so that nothing is fetched.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
_MODEL = """
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q @ k.transpose(-1, -2) / 4).softmax(-1) @ v


def build():
    torch.manual_seed(0)
    return Attention(), (torch.randn(2, 5, 16),), ({0: torch.export.Dim("batch")},)
"""


def built(folder: Path) -> Path:
    """The wheel, made of a copy of what git tracks or would."""
    source = folder / "source"
    listed = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    for name in filter(None, names.split("\0")):
        if not name.startswith(("attngraph", "passes", "export", "pyproject", "README", "LICENSE")):
            continue
        if not (ROOT / name).exists():
            continue
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name, follow_symlinks=False)
    build = ("wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), str(source))
    subprocess.run([sys.executable, "-m", "pip", *build], check=True)
    (wheel,) = folder.glob("attngraph-*.whl")
    _require_all_files(wheel, source)
    return wheel


def _require_all_files(wheel: Path, source: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    wanted = set()
    for top in ("attngraph", "passes", "export"):
        for file in (source / top).rglob("*"):
            if file.is_file():
                inside = file.relative_to(source)
                wanted.add(str(inside if top == "attngraph" else Path("attngraph", inside)))
    if lost := sorted(wanted - held):
        raise SystemExit(
            f"{wheel.name} lacks {', '.join(lost[:5])}: see package-data in pyproject."
        )


def installed(wheel: Path, folder: Path) -> Path:
    """The interpreter of a fresh environment that has the wheel, and our packages behind it."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    into = ("--python", str(python), "install", "-q", "--no-deps", "--no-index", str(wheel))
    subprocess.run([sys.executable, "-m", "pip", *into], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "ours.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return python


def main(folder: Path) -> None:
    """Raises CalledProcessError where a command fails."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    python = installed(built(folder), folder / "venv")
    work = folder / "work"
    work.mkdir()
    (work / "model.py").write_text(_MODEL)
    environment = {n: v for n, v in os.environ.items() if not n.startswith("PYTHON")}
    program = str(python.with_name("attngraph"))

    def run(*command: str) -> str:
        print("$", *command, flush=True)
        return subprocess.run(
            command, cwd=work, env=environment, check=True, stdout=subprocess.PIPE, text=True
        ).stdout

    home = run(str(python), "-c", "import attngraph; print(attngraph.__file__)").strip()
    assert Path(home).is_relative_to(folder.resolve()), home
    assert "optimize" in run(program, "--help")
    run(program, "doctor")
    run(
        program, "optimize", "--factory", "model:build", "-o", "model.onnx", "--report", "page.html"
    )
    assert "within the error budget" in run(
        program, "verify", "--factory", "model:build", "model.onnx"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
