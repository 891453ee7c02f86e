"""Kernels of finite networks: the exact empirical NTK of any JAX function."""

from ._empirical import EmpiricalKernel as EmpiricalKernel
from ._empirical import empirical_kernel as empirical_kernel
from ._empirical import kernel_block as kernel_block
from ._empirical import kernel_report as kernel_report
from ._empirical import kernel_rows as kernel_rows
from ._empirical import traced_kernel as traced_kernel
from ._products import ntk_mv as ntk_mv
from ._program import narrowest_dtype as narrowest_dtype
from ._recipe import KernelReport as KernelReport
from ._recipe import LeafReport as LeafReport
