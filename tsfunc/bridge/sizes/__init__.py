"""Symbolic sizes: their symbols, what is known of them, and the shapes that operators give."""
