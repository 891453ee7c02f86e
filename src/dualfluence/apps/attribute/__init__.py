"""The commands `dualfluence attribute` and `dualfluence audit`."""
