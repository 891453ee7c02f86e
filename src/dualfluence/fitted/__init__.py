"""The flow itself: fit or take over a model, edit its training set, keep it in a file."""
