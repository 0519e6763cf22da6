"""`python -m kvframework`: the command, for an environment whose scripts are not in PATH."""

from kvframework.cli.main import main

if __name__ == "__main__":
    main()
