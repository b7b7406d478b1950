"""Control flow at every level: traced bodies, runs on some of the examples, collectives."""
