"""`python -m dev …`."""

from dev.cli import main

if __name__ == "__main__":
    main()
