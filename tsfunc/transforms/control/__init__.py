"""Control flow that composes with every transform: one operator, or a few of a kind, per file."""
