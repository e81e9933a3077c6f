"""The command line. Nothing here imports torch before a command needs it."""

from attngraph.cli.app import main, run

__all__ = ["main", "run"]
