"""Ways to store `K`, one class for each structure, in a file each. To add one, subclass
`AbstractKernelOperator`."""

from ._base import AbstractKernelOperator as AbstractKernelOperator
from ._base import UnsupportedStructure as UnsupportedStructure
from ._bordered import BorderedOperator as BorderedOperator
from ._bordered import grow as grow
from ._dense import DenseOperator as DenseOperator
from ._dense import KroneckerOperator as KroneckerOperator
from ._implicit import LowRankOperator as LowRankOperator
from ._implicit import MatrixFreeOperator as MatrixFreeOperator
from ._mixed import MixedOperator as MixedOperator
from ._mixed import widen as widen
from ._sharded import ShardedMatrixFreeOperator as ShardedMatrixFreeOperator
from ._sharded import ShardedOperator as ShardedOperator
