"""In-place writes and write-through views: a plain tensor of the user becomes a tracer of a level.
"""
