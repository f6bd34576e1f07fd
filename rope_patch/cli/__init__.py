"""The rope-patch command, with one file per subcommand."""
