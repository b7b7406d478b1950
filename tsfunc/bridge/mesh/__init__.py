"""Mesh axes over processes; the only room that uses torch.distributed's private names."""
