"""Control flow that composes with every transform, an operator (or a few of a kind) a file."""
