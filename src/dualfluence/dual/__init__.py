"""The flow itself: fit or take over a model, edit its training set, read out what changed."""
