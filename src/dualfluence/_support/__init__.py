"""Helpers that know nothing of influence: checks, compilation, files, memory, progress."""
