"""`python -m flashwarp`: the `flashwarp` command."""

from flashwarp.cli.main import main

main()
