from ._base import AbstractKernelOperator as AbstractKernelOperator
from ._dense import DenseOperator as DenseOperator
from ._dense import KroneckerOperator as KroneckerOperator
from ._implicit import LowRankOperator as LowRankOperator
from ._implicit import MatrixFreeOperator as MatrixFreeOperator
