from ._base import AbstractKernelOperator as AbstractKernelOperator
from ._dense import DenseOperator as DenseOperator
from ._dense import KroneckerOperator as KroneckerOperator
from ._implicit import LowRankOperator as LowRankOperator
from ._implicit import MatrixFreeOperator as MatrixFreeOperator
from ._sharded import BorderedOperator as BorderedOperator
from ._sharded import ShardedMatrixFreeOperator as ShardedMatrixFreeOperator
from ._sharded import ShardedOperator as ShardedOperator
