"""Guards: the calls that a program answers, and the reasons why it does not answer others."""
