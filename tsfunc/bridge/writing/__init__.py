"""Writes, and views that are written through: a user's tensor becomes a level's tracer."""
