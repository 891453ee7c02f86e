"""One ordinary call of every public name, with its truth: the rows of `test_ordinary_calls.py`."""
