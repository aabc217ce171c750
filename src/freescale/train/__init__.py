"""A training run: one step (`step`), the loop around it (`trainer`), and the only place that wires rooms (`build`)."""
