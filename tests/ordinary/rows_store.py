"""Kernels on disk."""

import numpy as np

import dualfluence as dfl
from dualfluence import store
from dualfluence._support.files import FileError

from .table import each, raises, row


@row(*each("store", "Store", "array can_open chunk_path complete error is_recorded is_sound"))
@row(*each("store", "Store", "num_bytes operator receive record record_path request"))
@row("store.build", "store.open_store", "store.StoredOperator", "store.StoreError", shared=True)
def a_kernel_on_disk(at):
    path, K = at.folder / "store", at.K.reshape(at.n * at.c, -1)
    made = store.build(at.model, at.x, path, tile=2)
    assert isinstance(made, store.Store)
    found = store.open_store(path)
    assert found.complete
    assert found.can_open()
    np.testing.assert_equal(found.error, 0.0)
    np.testing.assert_equal(found.array.shape, K.shape)
    tile = found.header.tiles[-1]
    rows, cols = (found.header.rows(i) for i in tile)
    assert found.is_recorded(tile)
    assert found.is_sound(tile)
    at.close(found.receive(tile, found.request(tile)), K[rows, cols])
    np.testing.assert_array_equal(found.record(tile).tile, tile)
    assert found.record_path(tile).exists()
    assert found.chunk_path(tile).exists()
    assert found.num_bytes <= (at.n * at.c + 2 * at.c) ** 2 * at.dtype.itemsize
    op = found.operator()
    assert isinstance(op, store.StoredOperator)
    at.close(op.dense(), K)
    fitted = dfl.fit(at.model, at.x, at.y, loss=dfl.SquaredError(), ridge=at.ridge, kernel=op)
    at.close(fitted.outputs, at.fitted.outputs, 5)
    with raises(store.StoreError, "."):
        store.open_store(at.folder / "nothing-here")
    assert issubclass(store.StoreError, FileError)


@row("store.spool")
def batches_become_rows_on_disk(at):
    rows = store.spool((at.x[i : i + 2] for i in range(0, at.n, 2)), at.folder / "rows.npy")
    np.testing.assert_array_equal(rows, at.x)
    made = store.build(at.model, rows, at.folder / "spooled", tile=2)
    at.close(made.operator().dense(), at.K.reshape(at.n * at.c, -1))
    with raises(FileError, "exists"):
        store.spool([at.x], at.folder / "rows.npy")
