"""Benchmarks: each returns plain numbers for JSON. Ratios are measured side by side in one run."""

from ._attribution import attribution_table as attribution_table
from ._attribution import bench_attribution as bench_attribution
from ._attribution import plot_attribution as plot_attribution
from ._core import bench_core as bench_core
from ._core import peak_memory as peak_memory
from ._kernels import bench_kernels as bench_kernels
from ._rival_scores import Trained as Trained
from ._rival_scores import rival_scores as rival_scores
