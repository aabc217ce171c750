"""A training run: the operations of a step (`step`), the loop around it (`trainer`), and its wiring (`build`)."""
