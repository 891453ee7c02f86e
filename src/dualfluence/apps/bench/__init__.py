"""Benchmarks: each returns plain numbers for JSON. Ratios are measured side by side in one run."""

from ._core import bench_core as bench_core
from ._core import peak_memory as peak_memory
from ._kernels import bench_kernels as bench_kernels
