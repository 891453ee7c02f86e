"""A model in dual variables: what it is, how it is read out, the Newton iteration that trains it."""
