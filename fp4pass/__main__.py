"""`python -m fp4pass`: the command line."""

from .cli import main

main()
