"""``python -m trimtab``."""

from trimtab.cli.main import main

if __name__ == "__main__":
    main()
