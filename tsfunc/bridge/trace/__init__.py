"""The Trace and Specialize keys, and the questions of a traced function about its tensors."""
