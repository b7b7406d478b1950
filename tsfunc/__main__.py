"""The entry point of ``python -m tsfunc``."""

from __future__ import annotations

from tsfunc.cli import main

if __name__ == "__main__":
    main()
