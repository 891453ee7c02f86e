"""What every compiled program of a call holds at once, as the compiler says."""

import contextlib

import jax

from dualfluence._support.compile import Compiled


@contextlib.contextmanager
def compiled_peaks():
    """Names and bytes of the programs that run: arguments, results and work space together.

    Programs are optimised as for a user: the tests' quick ones hold more.
    """
    peaks, plain = [], Compiled.__call__

    def call(self, *args, **kwargs):
        leaves = jax.tree.leaves((args, kwargs))
        if not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            program = self._pick(leaves, False).lower(*args, **kwargs).compile()
            found = getattr(program, "compiled", program).memory_analysis()
            total = found.argument_size_in_bytes + found.output_size_in_bytes
            total += found.temp_size_in_bytes - found.alias_size_in_bytes
            once = {id(leaf): leaf for leaf in leaves if isinstance(leaf, jax.Array)}.values()
            every = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, jax.Array))
            total -= every - sum(leaf.nbytes for leaf in once)  # an array given twice is held once
            peaks.append((self.__name__, total))
        return plain(self, *args, **kwargs)

    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    Compiled.__call__ = call
    try:
        yield peaks
    finally:
        Compiled.__call__ = plain
        jax.config.update("jax_disable_most_optimizations", before)
