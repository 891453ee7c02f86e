"""`python -m dualfluence` is the command `dualfluence`."""

from .apps.cli import main

if __name__ == "__main__":
    main()
