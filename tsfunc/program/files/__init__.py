"""Files of programs: the output of ``save`` and input of ``load``; docs/files.md has the format.

The modules, in the order in which a file is read: ``archive`` is the container and checks JSON
values, ``tensors`` has the weights, ``json_values`` the other building blocks of programs,
``operator_calls`` checks calls against their schemas, ``graphs`` has the code, ``programs`` are
complete programs, and ``saved_functions`` are functions with their programs.
"""
