"""Data sets: a small embedded MNIST, and the full sets from a folder or a checked download."""

from ._dataset import Dataset as Dataset
from ._dataset import plus_minus_one as plus_minus_one
from ._dataset import subset as subset
from ._load import load as load
