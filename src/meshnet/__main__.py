"""`python -m meshnet`: the same as the `meshnet` command."""

from meshnet.cli import main

main()
