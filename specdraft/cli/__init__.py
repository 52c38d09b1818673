"""The command line: one thin file per sub-command."""
