"""What a step consists of and in which order it may run. The description knows no torch."""
