"""Random programs under random towers of transforms, compared with an independent reference.

The parts, in the order in which a run uses them: ``program`` (the syntax tree and its Python),
``constructs`` and ``draw`` (random functions), ``towers`` (random transforms of them),
``reference`` (the oracle), ``running`` (one comparison), ``workers`` (processes that may die),
``minimizing``, ``report``.
"""
