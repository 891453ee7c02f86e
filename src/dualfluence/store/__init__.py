"""Kernels on disk: built in tiles, checksummed, resumable, streamed through products."""

from .._support.rows import spool as spool
from ._build import build as build
from ._format import StoreError as StoreError
from ._store import Store as Store
from ._store import StoredOperator as StoredOperator
from ._store import open_store as open_store
