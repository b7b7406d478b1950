"""Symbolic sizes: their symbols, the facts known about them, and operators' result shapes."""
