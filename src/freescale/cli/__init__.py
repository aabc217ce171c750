"""The command line. Commands parse options and print results; the packages below do the work."""
