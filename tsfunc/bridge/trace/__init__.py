"""The Trace and Specialize keys, and what a traced function asks of its tensors."""
