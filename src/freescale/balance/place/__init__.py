"""Where samples go. Pure: from costs and homes to ranks, by moving the excess or by dealing anew."""
