"""Helpers that have nothing to do with influence: checks, compilation, files, memory, progress."""
