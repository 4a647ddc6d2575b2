"""``python -m foredraft`` and ``torchrun -m foredraft`` are the ``foredraft`` command."""

from foredraft.cli.main import main

main()
