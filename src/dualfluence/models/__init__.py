"""The models that `fit` accepts: networks, kernels, kernels of low rank, any of them on a mesh."""

from ._kernel import Kernel as Kernel
from ._kernel import SymmetricKernel as SymmetricKernel
from ._low_rank import low_rank as low_rank
from ._sources import AbstractSource as AbstractSource
from ._sources import PrecomputedKernel as PrecomputedKernel
