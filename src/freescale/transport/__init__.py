"""Transports: move bytes between ranks behind one interface (`base.Transport`), independent of their content."""
