"""In-place writes and write-through views: a user's plain tensor becomes a level's tracer."""
