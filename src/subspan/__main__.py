"""``python -m subspan``: what the ``subspan`` command does."""

from subspan.cli import main

main()
