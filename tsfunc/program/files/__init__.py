"""Files of programs: the output of ``save`` and input of ``load``; docs/files.md has the format.

The modules, in the order in which a file is read: ``archive`` is the container and checks JSON
values, ``tensors`` has the weights, ``values`` the other building blocks of programs, ``operators``
checks calls against their schemas, ``graphs`` has the code, and ``programs`` are complete programs.
"""
