"""Applications of the library: comparisons, demo, benchmarks, the paper, the command line."""
