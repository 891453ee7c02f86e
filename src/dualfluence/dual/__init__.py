"""The main functions: fit or take over a model, edit its training set, and ask what changed."""
