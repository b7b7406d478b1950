"""Control flow at every level: traced bodies, runs on subsets of the examples, collectives."""
