"""torch's autograd at a level: backward passes, duals, Functions with custom derivatives."""
