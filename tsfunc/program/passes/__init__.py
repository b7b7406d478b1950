"""Passes over a program's graph: ``simplify`` runs them, and ``verify`` checks the result."""
