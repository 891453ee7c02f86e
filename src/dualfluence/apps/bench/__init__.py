"""One removal request beside its rivals, as plain numbers for JSON, measured side by side in one run."""

from ._core import bench_core as bench_core
from ._core import peak_memory as peak_memory
