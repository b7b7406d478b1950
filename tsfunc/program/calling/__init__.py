"""The calls of a specialized function: the programs it keeps, and the capture of new ones."""
