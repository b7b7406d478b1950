"""Mesh axes over processes; the only package that uses torch.distributed's private names."""
