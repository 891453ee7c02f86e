"""The comparison kit, shared by the demo, the benchmarks and the paper's experiments.

`_names` and `_look` are for readers of results and import neither JAX nor plotting; `_networks`,
`_methods`, `_timing`, `_removals` and `_machine` measure.
"""
