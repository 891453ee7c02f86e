"""Influence functions in parameter space, as in the literature, with several solvers."""

from ._attribute import attribute as attribute
from ._influence import influence as influence
from ._kronecker import EKFAC as EKFAC
from ._kronecker import KFAC as KFAC
from ._lissa import LiSSA as LiSSA
from ._low_rank import Arnoldi as Arnoldi
from ._low_rank import Nystrom as Nystrom
from ._solvers import CG as CG
from ._solvers import AbstractPrimalSolver as AbstractPrimalSolver
from ._update import PrimalUpdate as PrimalUpdate
