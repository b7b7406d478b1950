"""What a trace asked of named dims, and descriptors that promise it."""
