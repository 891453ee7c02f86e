"""Dense linear algebra: triangular matrices, explicit inverses, Lanczos' method."""

from ._each import cholesky as cholesky
from ._each import each as each
from ._each import lower_inverse as lower_inverse
from ._each import solve_each as solve_each
from ._each import spectrum_each as spectrum_each
from ._inverse import AbstractInverse as AbstractInverse
from ._inverse import CholeskyInverse as CholeskyInverse
from ._inverse import CholeskySolves as CholeskySolves
from ._inverse import SpectralInverse as SpectralInverse
from ._inverse import inverse_transpose as inverse_transpose
from ._inverse import shifted_cholesky as shifted_cholesky
from ._inverse import solve_lower as solve_lower
from ._inverse import spectrum as spectrum
from ._inverse import upper_mm as upper_mm
from ._lanczos import Krylov as Krylov
from ._lanczos import lanczos as lanczos
from ._spread import SpreadCholesky as SpreadCholesky
from ._spread import spread_cholesky as spread_cholesky
