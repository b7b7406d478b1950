"""Guards: the calls that a program serves, and the reasons why it refuses others."""
