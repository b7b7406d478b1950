"""Prints the table of ``docs/dependencies.md``: ``python -m tsfunc.bridge.private_names``."""

from tsfunc.bridge.private_names import dependency_table

print(dependency_table())
