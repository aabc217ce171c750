"""What other machines would do with a run: the trainer's own schedule, plans and ledger, on a clock instead of devices.

Never imports torch. Knows no process group and no model: a step is what its schedule says and what its samples cost.
"""
