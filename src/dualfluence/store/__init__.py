"""Kernels on disk: built in tiles, checksummed, resumable, streamed through products."""

from ._build import build as build
from ._format import Store as Store
from ._format import StoreError as StoreError
from ._format import open_store as open_store
from ._operator import StoredOperator as StoredOperator
