"""The Trace and Specialize keys, and guards on the properties of tensors that a trace reads."""
