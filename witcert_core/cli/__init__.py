"""The command `witcert`."""

from witcert_core.cli.app import main

__all__ = ["main"]
