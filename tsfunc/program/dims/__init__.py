"""The constraints on named dims that a trace relies on, and descriptors that guarantee them."""
