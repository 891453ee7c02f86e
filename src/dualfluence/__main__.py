"""`python -m dualfluence` is the command `dualfluence`."""

from .cli import main

if __name__ == "__main__":
    main()
