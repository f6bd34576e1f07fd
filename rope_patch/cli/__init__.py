"""The rope-patch command, one file a command."""
