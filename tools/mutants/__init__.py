"""Mutants: small changes of the code that the tests should notice (``docs/mutants.md``)."""
