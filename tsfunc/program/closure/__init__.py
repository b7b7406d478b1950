"""The reads and assignments of a traced function beyond its arguments, recorded while it runs."""
