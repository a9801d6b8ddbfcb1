"""The command line."""

from populace.cli.app import main

__all__ = ["main"]
