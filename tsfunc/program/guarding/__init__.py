"""Which calls a program answers, and why not others."""
