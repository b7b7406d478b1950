"""Tracers, the two doors through which torch calls reach them, and reads of torch's state."""
