"""Files of programs: the output of ``save`` and input of ``load``; docs/files.md has the format.

The modules, in the order in which a file is read: ``archive`` is the container, ``fields`` checks
JSON values, ``tensors``, ``values`` and ``trees`` are the building blocks of programs,
``operators`` checks calls against their schemas, ``graphs`` and ``control`` are the code, and
``programs`` are complete programs.
"""
