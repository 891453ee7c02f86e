"""The flow itself: fit or take over a model, edit its training set, keep it in a file.

A fit passes three stages: `_options` checks what was asked for, `_setup` prepares data, `K` and
preconditioner, `_run` takes Newton steps. An edit passes the first and the last, and `_update` says what it
changed. `_fitted` puts a model together.
"""
