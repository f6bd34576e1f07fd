"""``python -m rope_patch``, the same as ``rope-patch``."""

from rope_patch.cli.app import main

if __name__ == "__main__":
    main()
