"""Tracers, the two handlers through which torch calls reach them, and reads of torch's state."""
