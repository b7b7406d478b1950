"""Tracers, the two doors by which calls of torch reach them, and what both ask of torch's state."""
