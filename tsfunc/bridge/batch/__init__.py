"""The Batch key: batching rules for operators of batched tensors, and calls without a rule."""
