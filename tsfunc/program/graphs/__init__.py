"""A program: its graph as Python, as torch's own, drawn, printed, and asked about."""
