"""`python -m attngraph`."""

from attngraph.cli import main

if __name__ == "__main__":
    main()
