"""torch's autograd at a level: backward passes, duals, functions with rules of their own."""
