"""Symbolic sizes: their symbols, the known facts about them, and the result shapes of operators.
"""
