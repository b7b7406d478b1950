"""Forms of a program: Python source, torch.fx module, export, drawing, text, properties."""
