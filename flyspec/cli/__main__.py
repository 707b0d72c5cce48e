"""`python -m flyspec.cli`: the command line from a checkout that is not installed."""

from flyspec.cli.main import main

if __name__ == "__main__":
    main()
