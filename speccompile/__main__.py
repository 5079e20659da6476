"""``python -m speccompile`` and ``torchrun -m speccompile``: the command line."""

from speccompile.cli.main import main

if __name__ == "__main__":
    main()
