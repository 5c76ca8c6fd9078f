"""``python -m jumok``: the same as ``jumok``, and what ``torchrun -m jumok`` starts."""

from jumok.cli.app import main

if __name__ == "__main__":
    main()
