"""Influence functions, data attribution and unlearning in data space."""
