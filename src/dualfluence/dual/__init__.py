"""A model in dual variables, and the Newton iteration that trains it.

`_model` is the model and what is read from it. `_train` runs its training: `_newton` is one step, and
`_course` decides after each step how to go on and when to end. `_reweighted` trains many models at once;
`_fidelity` compares one with the network it linearises.
"""
