"""The catalogue of the operators that torch registers, with facts about each of them.

``aten.tsv`` is the table, in readable form with one overload per line. ``decided.txt`` has the
decisions made by hand, ``classify.py`` the rules for other operators, ``trial.py`` the trial calls
of operators, and ``lookup.py`` the queries. The catalogue is loaded at the first query.
"""
