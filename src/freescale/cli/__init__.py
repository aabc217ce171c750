"""What a user types. Each command is a thin file; the work is done in the rooms below."""
