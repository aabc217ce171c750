"""A fuzz of the command line: valid worlds, random commands over them, processes that run them, and verdicts."""
