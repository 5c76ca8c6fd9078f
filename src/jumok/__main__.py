"""``python -m jumok`` runs the ``jumok`` command. ``torchrun -m jumok`` uses it for distributed training."""

from jumok.cli import main

if __name__ == "__main__":
    main()
