"""Bodies of `dualfluence attribute` and `dualfluence audit`."""
