"""The catalogue: what is known of every operator that torch registers.

``aten.tsv`` is the table, a line an overload, for people to read. ``decided.txt`` has what a
person decided, ``classify.py`` the rules for the rest, ``trial.py`` tries operators, and
``lookup.py`` answers. Nothing of it is loaded before somebody asks.
"""
