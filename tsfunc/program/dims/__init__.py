"""The facts about named dims that a trace relies on, and descriptors that guarantee them."""
