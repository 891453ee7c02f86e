"""The original influence function, in parameter space, for comparison with the dual one."""

from ._influence import influence as influence
from ._update import PrimalUpdate as PrimalUpdate
