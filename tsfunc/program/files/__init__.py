"""Files of programs: what ``save`` writes and ``load`` reads. The format is in docs/files.md.

In the order in which a file is taken in: ``archive`` is the container, ``fields`` asks JSON for
what it must be, ``tensors``, ``values`` and ``trees`` are what programs are made of, ``operators``
holds calls to their schemas, ``graphs`` and ``control`` are the code, ``programs`` the whole.
"""
