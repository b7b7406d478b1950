"""The Batch key: the ways of a call of batched tensors to its rule, and what has none."""
