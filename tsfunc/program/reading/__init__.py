"""What a traced function reads and assigns beside its arguments, watched while it runs."""
