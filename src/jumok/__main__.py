"""``python -m jumok``: the same as ``jumok``, and what ``torchrun -m jumok`` starts."""

from jumok.cli import main

if __name__ == "__main__":
    main()
